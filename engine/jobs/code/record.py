"""The code of a run in its folder, `RUN/code`: what it was when the run was made, and how it differs from that later.

| file | contents |
|---|---|
| `code.json` | `CodeRecord` |
| `changes.patch` | the diff of the tracked files since the commit, for `git apply` |
| `untracked/` | untracked text files, by their paths |
| `copy/` | with `run.snapshot`: the working tree, with links to what is ignored, large or secret |

Only its user can read the folder. Nothing in it is sent to another service.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated

from engine.base.codec import ENTRIES, FileRecord, InvalidRecordError, decode, write_record
from engine.base.errors import UsageError
from engine.base.files import opened, read_file
from engine.base.text import list_names, pluralize, printable
from engine.base.units import format_bytes
from engine.jobs.code.git import GitError, Repository, find_repository
from engine.jobs.code.state import (
    MODULE_MODE,
    CodeDigests,
    filtered_paths,
    is_below,
    is_imported,
    is_secret_file,
    list_untracked,
    read_code,
)
from engine.runs.command_events import MAX_EVENT_FILES, CodeChanged
from engine.runs.folder import CODE_COPY, CODE_RECORD, RunFolder
from engine.runs.records import CodeSummary

MAX_COPIED_BYTES = 1 << 32
MAX_COPIED_FILES = 200_000
# Larger files are data.
MAX_COPIED_FILE_BYTES = 1 << 26
# Python and its tools write them again.
CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".ipynb_checkpoints"})


@dataclass
class CopyPlan:
    """The files to copy, with their status, and the paths to link."""

    copied: dict[str, os.stat_result] = field(default_factory=dict)
    linked: list[str] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(status.st_size for status in self.copied.values())

    def __str__(self) -> str:
        return f"{pluralize(len(self.copied), 'file')} with {format_bytes(self.size_bytes)}"


def copy_code(repository: Repository, target: Path, runs_dir: Path) -> Sequence[str]:
    """Copy the working tree to `target`, and return what is linked.

    Raises GitError, OSError, and UsageError if there is too much to copy."""
    plan = plan_copy(repository, runs_dir)
    target.mkdir(mode=0o700)
    for folder in dict.fromkeys(path.rpartition("/")[0] for path in (*plan.copied, *plan.linked)):
        (target / folder).mkdir(parents=True, exist_ok=True)
    for path, status in plan.copied.items():
        if stat.S_ISLNK(status.st_mode):
            _copy_link(repository.root / path, target / path, repository.root)
        else:
            shutil.copy2(f"{repository.root}/{path}", f"{target}/{path}", follow_symlinks=False)
    for path in plan.linked:
        (target / path).symlink_to(repository.root / path)
    return plan.linked


def plan_copy(repository: Repository, runs_dir: Path) -> CopyPlan:
    """Return what a copy of the working tree contains, and what it links to.

    Raises GitError, and UsageError if there is too much to copy."""
    plan, root, runs = CopyPlan(), repository.root, Path(os.path.realpath(runs_dir))
    tracked = repository.lines("ls-files", "-z", "--stage", "--cached")
    modes = {path: mode for mode, path in map(_staged, tracked)}
    if runs == root or root.is_relative_to(runs):
        reason = f"the runs folder {printable(str(runs))} is the repository itself or above it"
        raise UsageError.one("run.snapshot", reason, "use another one with --runs-dir", code="conflict")
    paths = [*modes, *list_untracked(repository, runs_dir, hidden=True)]
    filtered = filtered_paths(repository, paths)
    real_folders: dict[str, bool] = {}
    for path in dict.fromkeys(paths):
        folder = os.path.dirname(path.rstrip("/"))  # noqa: PTH120 (of thousands)
        if folder not in real_folders:
            # Below a folder that became a link, a copy would be written to where that leads.
            real_folders[folder] = os.path.realpath(root / folder) == os.path.normpath(root / folder)
        try:
            status = os.lstat(root / path)
        except OSError:
            # Deleted since the commit.
            continue
        if not is_below(path) or not real_folders[folder]:
            continue
        if modes.get(path) == MODULE_MODE or path.endswith("/"):
            # A submodule, or a repository that is nested in this one. Any other folder has taken the place of a tracked
            # file, and what is in it is untracked.
            _add_nested(plan, root, path.rstrip("/"), runs_dir)
        elif is_secret_file(path) or path in filtered or status.st_size > MAX_COPIED_FILE_BYTES:
            plan.linked.append(path)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            plan.copied[path] = status
    ignored = repository.lines("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    for path in ignored:
        plan.linked += _linked_below(root, path.rstrip("/"), runs)
    if plan.size_bytes > MAX_COPIED_BYTES or len(plan.copied) > MAX_COPIED_FILES:
        reason = f"{plan} in {printable(str(root))} are too much to copy"
        raise UsageError.one("run.snapshot", reason, "add data to .gitignore, which is linked", code="too-large")
    return plan


def _add_nested(plan: CopyPlan, root: Path, path: str, runs_dir: Path) -> None:
    """Add what a copy of a repository within the repository contains. Raises as `plan_copy` does."""
    if not os.path.lexists(root / path / ".git"):
        if any((root / path).iterdir()):
            raise GitError(f"contains {printable(path)}, a submodule with files, but without a repository")
        return
    nested = plan_copy(Repository(root / path), runs_dir)
    plan.copied |= {f"{path}/{name}": status for name, status in nested.copied.items()}
    plan.linked += [f"{path}/{name}" for name in nested.linked]


def _staged(line: str) -> tuple[str, str]:
    """Return mode and path of a line of `git ls-files --stage`."""
    facts, _, path = line.partition("\t")
    return facts.partition(" ")[0], path


def _linked_below(root: Path, path: str, runs: Path) -> Iterator[str]:
    """Yield an ignored path, or what is in it without the runs folder: a copy would contain itself."""
    place = root / path
    if place == runs or PurePath(path).suffix == ".pyc" or not CACHES.isdisjoint(PurePath(path).parts):
        return
    if runs.is_relative_to(place):
        for name in sorted(os.listdir(place)):  # noqa: PTH208 (names, not paths)
            yield from _linked_below(root, f"{path}/{name}", runs)
    else:
        yield path


def _copy_link(source: Path, target: Path, root: Path) -> None:
    """Copy a link: one within the tree leads to the copy, any other one to the original. Raises OSError."""
    link = source.readlink()
    place = Path(os.path.normpath(source.parent / link))
    if not place.is_relative_to(root):
        target.symlink_to(place)
    else:
        target.symlink_to(os.path.relpath(place, source.parent) if link.is_absolute() else link)


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
