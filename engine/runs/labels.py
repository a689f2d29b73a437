"""Labels that a user puts on a run: tags, a note, and whether it is archived. `RUN/labels.json` holds them.

Lists show them, and `engine.runs.query` filters by them. They change nothing in the run, so a live run can have them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated

from engine.base.codec import FileRecord, InvalidRecordError, Meta, change_record, read_record, replace
from engine.base.errors import UsageError, file_errors
from engine.runs.folder import RunFolder

MAX_TAGS = 20
MAX_NOTE_CHARACTERS = 2000
MAX_LABELS_BYTES = 1 << 16
TAG_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,39}"


Tag = Annotated[str, Meta(pattern=rf"^{TAG_PATTERN}\Z")]


class RunLabels(FileRecord, frozen=True, kw_only=True):
    """Tags, note and archive flag of a run. An archived run is in no list unless asked for."""

    tags: Annotated[tuple[Tag, ...], Meta(max_length=MAX_TAGS)] = ()
    note: Annotated[str, Meta(max_length=MAX_NOTE_CHARACTERS)] = ""
    archived: bool = False

    def with_tags(self, added: Iterable[str] = (), removed: Iterable[str] = ()) -> RunLabels:
        """Return the labels with more tags at the end, and without others."""
        gone = set(removed)
        return replace(self, tags=tuple(tag for tag in dict.fromkeys((*self.tags, *added)) if tag not in gone))


NO_LABELS = RunLabels()


def read_labels(folder: RunFolder) -> RunLabels:
    """Return the labels of a run. A file that cannot be read has none."""
    try:
        return read_record(f"{folder.path}/labels.json", RunLabels, MAX_LABELS_BYTES)
    except (OSError, InvalidRecordError):
        return NO_LABELS


def _is_unicode(text: str) -> bool:
    """Whether text can be encoded. JSON can hold half a character."""
    return text.encode(errors="replace").decode() == text


def check_labels(labels: RunLabels) -> None:
    """Raise UsageError if the labels must not be stored."""
    for tag in labels.tags:
        if re.fullmatch(TAG_PATTERN, tag) is None:
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

    Raises UsageError if the labels or their file are not valid, if other users can change the run, or
    if it cannot be written to.
    """
    if (problem := folder.owner_problem()) is not None:
        raise UsageError.one(folder.name, f"this run {problem}, so its labels cannot be changed", code="foreign-owner")

    def checked(labels: RunLabels) -> RunLabels:
        check_labels(changed := change(labels))
        return changed

    labels = change_record(folder.labels, folder.name, NO_LABELS, checked, MAX_LABELS_BYTES)
    with file_errors(folder.name, "its labels cannot be shared", code="not-writable"):
        # No file of a run is more open than its folder.
        folder.labels.chmod(0o644 & folder.status().st_mode)
    return labels
