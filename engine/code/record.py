"""The code of a run in its folder, `RUN/code`: what it was when the run was made, and how it differs from that later.

| file | contents |
|---|---|
| `code.json` | `CodeRecord` |
| `changes.patch` | the diff of the tracked files since the commit, for `git apply` |
| `untracked/` | untracked text files, by their paths |
| `copy/` | with `run.snapshot`: the working tree, see `engine.code.copy` |

Only its user can read the folder. Nothing in it is sent to another service.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from engine.code.copy import copy_code
from engine.code.git import find_repository
from engine.code.kinds import is_imported
from engine.code.state import CodeDigests, read_code
from engine.runs.code_events import MAX_EVENT_FILES, CodeChanged
from engine.runs.folder import CODE_COPY, CODE_RECORD, RunFolder
from engine.runs.records import CodeSummary
from engine.utils.codec import ENTRIES, FileRecord, InvalidRecordError, decode, write_record
from engine.utils.errors import UsageError
from engine.utils.files import opened, read_file
from engine.utils.text import list_names, pluralize, printable

PATCH_FILE, UNTRACKED_FOLDER = "changes.patch", "untracked"
MAX_RECORD_BYTES = 1 << 24
SNAPSHOT_KEY = "run.snapshot"


class CodeRecord(FileRecord, frozen=True, kw_only=True):
    """Content of `code.json`. Paths of files are relative to `root`."""

    root: str
    """The working tree of the repository."""
    folder: str
    """The working folder of the run in it; "." for its root."""
    digests: CodeDigests
    """What the code is compared by."""
    linked: Annotated[tuple[str, ...], ENTRIES] = ()
    """What the copy links to rather than contains."""
    snapshot: bool = False
    """Whether there is a copy."""

    def summary(self) -> CodeSummary:
        """Return the code in short."""
        return CodeSummary(
            commit=self.digests.commit,
            is_dirty=self.digests.is_dirty,
            fingerprint=self.digests.fingerprint,
            snapshot=self.snapshot,
        )


def require_repository(cwd: Path) -> None:
    """Raise UsageError if there can be no copy of the code around a working folder, because it is outside of git."""
    if find_repository(cwd) is None:
        reason = f"{printable(str(cwd))} is in no git repository, so which files are code is unknown"
        raise UsageError.one(SNAPSHOT_KEY, reason, "`git init && git add .` there", code="no-repository")


def capture_code(folder: RunFolder, cwd: Path, *, snapshot: bool = False) -> CodeRecord | None:
    """Record the code around the working folder of a run in the folder of the run; None outside of git.

    Raises GitError if it cannot be read, UsageError if there can be no copy, and OSError."""
    if snapshot:
        require_repository(cwd)
    if (repository := find_repository(cwd)) is None:
        return None
    runs_dir = folder.path.parent
    state = read_code(repository, runs_dir)
    target = folder.code
    target.mkdir(mode=0o700)
    linked = copy_code(repository, target / CODE_COPY, runs_dir) if snapshot else ()
    _write_private(target / PATCH_FILE, state.patch)
    for path, content in state.untracked.items():
        _write_private(target / UNTRACKED_FOLDER / path, content)
    record = CodeRecord(
        root=str(repository.root),
        folder=os.path.relpath(os.path.realpath(cwd), repository.root),
        digests=state.digests,
        linked=tuple(linked),
        snapshot=snapshot,
    )
    # Last: the files of the copy that are newer are those that the run has made.
    write_record(target / CODE_RECORD, record, private=True)
    return record


def read_code_record(folder: RunFolder) -> CodeRecord | None:
    """Return the recorded code of a run, None if there is none or it is damaged."""
    try:
        data, _ = read_file(folder.code / CODE_RECORD, MAX_RECORD_BYTES)
        return decode(data, CodeRecord)
    except (OSError, InvalidRecordError):
        return None


def find_change(record: CodeRecord, cwd: Path, runs_dir: Path) -> CodeChanged:
    """Return how the code around a folder differs from that of a run, which has no copy of it. Raises GitError."""
    if (repository := find_repository(cwd)) is None:
        message = f"its folder is in no git repository any more, and was in {printable(record.root)}"
        return CodeChanged(message=message, files=[])
    recorded, current = record.digests, read_code(repository, runs_dir).digests
    parts = []
    if recorded.commit != current.commit:
        parts.append(f"commit {current.commit[:10] or 'none'} in place of {recorded.commit[:10] or 'none'}")
    before, after = recorded.compared, current.compared
    # A new file that the code does not import changes nothing: the same command in the same files does not name it.
    files = [
        path
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and (path in before or path in current.changed or is_imported(path))
    ]
    if files:
        parts.append(f"{pluralize(len(files), 'file')} ({list_names([printable(path) for path in files])})")
    return CodeChanged(message=", ".join(parts), files=files[:MAX_EVENT_FILES])


def _write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its user can read, and its folders. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600) as handle,
        os.fdopen(handle, "wb", closefd=False) as file,
    ):
        file.write(content)
