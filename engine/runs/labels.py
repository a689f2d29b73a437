"""Labels that a user puts on a run: tags, a note, and whether it is archived. `RUN/labels.json` holds them.

Lists show them, and `engine.runs.query` filters by them. They change nothing in the run, so a live run can have them.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

from engine.runs.folder import RunFolder
from engine.utils.codec import (
    ENTRIES,
    FileRecord,
    InvalidRecordError,
    Meta,
    decode_valid_fields,
    replace,
    update_record,
)
from engine.utils.errors import UsageError
from engine.utils.files import path_of_descriptor, read_bytes, shown_path

MAX_TAGS = 20
MAX_NOTE_CHARACTERS = 2000
MAX_LABELS_BYTES = 1 << 16
TAG_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,39}"
# Another process changes labels within milliseconds. One that holds the lock for longer is not waited for.
LOCK_WAIT_SECONDS = 1.0


Tag = Annotated[str, Meta(pattern=rf"^{TAG_PATTERN}\Z")]


class RunLabels(FileRecord, frozen=True, kw_only=True):
    """Tags, note and archive flag of a run. An archived run is in no list unless asked for."""

    tags: Annotated[tuple[Tag, ...], ENTRIES] = ()
    note: str = ""
    archived: bool = False

    def with_tags(self, added: Iterable[str] = (), removed: Iterable[str] = ()) -> RunLabels:
        """Return the labels with more tags at the end, and without others."""
        gone = set(removed)
        return replace(self, tags=tuple(tag for tag in dict.fromkeys((*self.tags, *added)) if tag not in gone))


NO_LABELS = RunLabels()


def read_labels(folder: RunFolder) -> RunLabels:
    """Return the labels of a run. What is missing or invalid, such as a tag of another form, counts as not set."""
    with suppress(InvalidRecordError):
        return _read(folder)
    return NO_LABELS


def _read(folder: RunFolder) -> RunLabels:
    """Return the labels of a run. Raises InvalidRecordError if they have another format."""
    try:
        labels = decode_valid_fields(read_bytes(f"{folder.root}/labels.json", MAX_LABELS_BYTES), RunLabels)
    except OSError:
        return NO_LABELS
    except InvalidRecordError as error:
        if error.code == "wrong-version":
            raise
        return NO_LABELS
    tags = tuple(dict.fromkeys(labels.tags))[:MAX_TAGS]
    note = labels.note[:MAX_NOTE_CHARACTERS] if _is_unicode(labels.note) else ""
    return replace(labels, tags=tags, note=note)


def is_tag(tag: str) -> bool:
    """Whether a value is a valid tag."""
    return re.fullmatch(TAG_PATTERN, tag) is not None


def _is_unicode(text: str) -> bool:
    """Whether text can be encoded. JSON can hold half a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_labels(labels: RunLabels) -> None:
    """Raise UsageError if the labels must not be stored."""
    for tag in labels.tags:
        if not is_tag(tag):
            advice = "use 1 to 40 letters, digits and . _ - / : and begin with a letter or digit"
            raise UsageError.one(tag, "is not a valid tag", advice, code="invalid-value")
    if len(labels.tags) > MAX_TAGS:
        raise UsageError.one(
            "tags", f"{len(labels.tags)} are more than the {MAX_TAGS} that a run can have", code="too-many"
        )
    if len(labels.note) > MAX_NOTE_CHARACTERS:
        length = len(labels.note)
        raise UsageError.one(
            "note", f"has {length} characters; at most {MAX_NOTE_CHARACTERS} are stored", code="too-large"
        )
    if not _is_unicode(labels.note):
        raise UsageError.one("note", "is not valid UTF-8", code="invalid-value")


def change_labels(folder: RunFolder, change: Callable[[RunLabels], RunLabels]) -> RunLabels:
    """Change the labels of a run, and return the new ones. Fields that this version does not know are kept.

    Raises UsageError if the labels are not valid or the file has another format, if other users can change the run, or
    if it cannot be written to.
    """
    if (problem := folder.owner_problem()) is not None:
        raise UsageError.one(folder.name, f"this run {problem}, so its labels cannot be changed", code="foreign-owner")
    try:
        with _held(folder) as held, _locked(held.held_fd):
            labels = change(_read(held))
            check_labels(labels)
            update_record(held.labels, labels, MAX_LABELS_BYTES)
            # No file of a run is more open than its folder.
            held.labels.chmod(0o644 & os.fstat(held.held_fd).st_mode)
    except InvalidRecordError as error:
        advice = f"use the gputrain that wrote it, or delete {shown_path(folder.labels)}"
        raise UsageError.one(folder.name, f"its {folder.labels.name} {error}", advice, code=error.code) from error
    except OSError as error:
        raise UsageError.one(
            folder.name, f"its labels cannot be written: {error.strerror}", code="not-writable"
        ) from error
    return labels


@contextmanager
def _held(folder: RunFolder) -> Iterator[RunFolder]:
    """Yield the folder with a descriptor. Raises OSError unless it is a folder."""
    held = folder if folder.fd is not None else folder.hold()
    try:
        yield held
    finally:
        if folder.fd is None:
            os.close(held.held_fd)


@contextmanager
def _locked(folder_fd: int) -> Iterator[None]:
    """Keep other processes from changing the labels, so that none of two changes is lost.

    Whoever can read a folder can lock it for as long as they like, and not every file system has locks, so this waits
    only for `LOCK_WAIT_SECONDS`.
    """
    # A lock belongs to a descriptor, and other threads may use `folder_fd`.
    handle = os.open(path_of_descriptor(folder_fd), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
