"""Rename, delete and restore runs that have ended. `engine.runs.labels` archives and tags them.

A run is renamed under its lock, so that no process resumes it meanwhile. Deleted runs are in `ROOT/.trash` until it is
emptied. As in the trash specification of freedesktop.org, a user who cannot use `.trash`, because another user made it,
has `.trash-UID`. Links are never followed."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import UsageError, did_you_mean, file_errors
from engine.base.text import pluralize
from engine.base.trust import foreign_reason
from engine.base.units import format_bytes
from engine.config.run_name import name_problem, normalize_name
from engine.runs.checkpoint_files import list_checkpoints
from engine.runs.find import find_run
from engine.runs.folder import RunFolder
from engine.runs.ownership import locked_ended_run
from engine.runs.root import LAST_RUN, is_run_folder


def rename_run(folder: RunFolder, name: str) -> RunFolder:
    """Rename the folder of a run that has ended, and return it.

    The journal and the config keep the name that each session had. Raises UsageError if the name is invalid or in use,
    if the run is live, or if other users can change it.
    """
    name = check_new_name(name)
    folder.require_own(trust_owner=False, can_trust=False)
    if name == folder.name:
        raise UsageError.one(name, "is the name that the run has", code="name-in-use")
    root = folder.path.parent
    with file_errors(folder.name, "cannot be renamed", code="not-writable"), locked_ended_run(folder):
        return RunFolder(move_folder(folder.path, root, name))


def check_new_name(name: str) -> str:
    """Return the normalized name. Raises UsageError if a run cannot have it."""
    name = normalize_name(name)
    if (problem := name_problem(name)) is not None:
        raise UsageError.one(name, f"is not a valid name of a run: {problem}", code="invalid-name")
    if name == LAST_RUN:
        raise UsageError.one(name, "is reserved: it stands for the newest run", "use another name", code="invalid-name")
    return name


def move_folder(source: Path, target_folder: Path, name: str, advice: str = "use another name") -> Path:
    """Rename a folder without replacing anything. Raises UsageError if the name is in use, and OSError."""
    target = target_folder / name
    try:
        # rename(2) replaces an empty folder, such as one that a new run has just made, but mkdir(2) fails.
        target.mkdir(0o700)
    except FileExistsError as error:
        raise UsageError.one(name, f"already exists in {target_folder}", advice, code="name-in-use") from error
    try:
        source.rename(target)
    except OSError:
        with suppress(OSError):
            target.rmdir()
        raise
    return target


def find_own_run(root: Path, reference: str) -> RunFolder:
    """Return a run of this user by name, path or `last`. Raises UsageError as `find_run` does.

    Unlike `find_run`, it accepts a run that contains links: they are moved, and never followed.
    """
    for path in (root / reference, Path(os.path.realpath(reference))):
        if reference != LAST_RUN and is_run_folder(path) and path.parent != path:
            return RunFolder(path)
    return find_run(root, reference)


TRASH_FOLDER = ".trash"
# A run whose name is in the trash already gets a number after a sign that no run of gputrain has in its name. A folder
# that was copied or renamed by hand has any name, such as `base (copy)`.
_NUMBER = re.compile(r"(?<=.)~[0-9]+\Z", re.DOTALL)
# Contents are counted for a question; a run with more files is described by a lower bound.
MAX_COUNTED_FILES = 100_000


@dataclass(frozen=True)
class RunContents:
    """What a run consists of: number of files, bytes on disk (hard links once) and number of checkpoints."""

    files: int
    size_bytes: int
    checkpoints: int

    def __str__(self) -> str:
        files, checkpoints = pluralize(self.files, "file"), pluralize(self.checkpoints, "checkpoint")
        return f"{files}, {format_bytes(self.size_bytes)}, {checkpoints}"


@dataclass(frozen=True)
class TrashedRun:
    """A run in the trash. `name` is its name before, `entry` that of its folder in the trash. `deleted_at` is the time
    of the deletion in Unix seconds."""

    name: str
    entry: str
    path: Path
    deleted_at: float


def run_contents(path: Path) -> RunContents:
    """Count the files of a run. Links count as files and are not followed; unreadable folders are skipped."""
    files, sizes = 0, dict[tuple[int, int], int]()
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                status = os.lstat(f"{folder}/{name}")
                files, sizes[status.st_dev, status.st_ino] = files + 1, status.st_size
        if files >= MAX_COUNTED_FILES:
            break
    return RunContents(files, sum(sizes.values()), len(list_checkpoints(path / "checkpoints")))


def move_to_trash(folder: RunFolder) -> TrashedRun:
    """Move a run that has ended to the trash of its runs folder.

    Raises UsageError if a process owns the run, if it belongs to another user, or if it cannot be moved.
    """
    try:
        if not folder.is_of_this_user:
            reason = f"this run {folder.owner_problem()}, so you cannot delete it"
            raise UsageError.one(folder.name, reason, code="foreign-owner")
        if folder.path.parent.name.startswith(TRASH_FOLDER):
            advice = "empty it with `gputrain runs trash --empty`"
            raise UsageError.one(folder.name, "is in the trash already", advice, code="wrong-state")
        with locked_ended_run(folder):
            trash, name, number = _make_trash(folder.path.parent), folder.name, 1
            while os.path.lexists(trash / name):
                number += 1
                name = f"{folder.name}~{number}"
            return _entry(move_folder(folder.path, trash, name))
    except OSError as error:
        reason = f"cannot be moved to the trash: {error.strerror}"
        advice = ""
        if error.errno in (errno.EXDEV, errno.EBUSY):
            advice = f"it is on a file system of its own; delete it with `rm -r {folder.path}`"
        raise UsageError.one(folder.name, reason, advice, code="not-writable") from error


def list_trash(root: Path) -> list[TrashedRun]:
    """Return the runs in the trash of this user, latest deletion first."""
    runs = []
    trash = next(filter(_is_own_folder, _trash_candidates(root)), None)
    for path in trash.iterdir() if trash is not None else ():
        with suppress(OSError):
            if _is_own_folder(path):
                runs.append(_entry(path))
    return sorted(runs, key=lambda run: (-run.deleted_at, run.entry))


def find_in_trash(root: Path, reference: str) -> TrashedRun:
    """Return a run in the trash by the name of its folder there, or by its name before: then the one deleted last.

    Raises UsageError if there is none.
    """
    runs = list_trash(root)
    for key in (lambda run: run.entry, lambda run: normalize_name(run.entry), lambda run: normalize_name(run.name)):
        for run in runs:
            if key(run) in (reference, normalize_name(reference)):
                return run
    names = [run.entry for run in runs]
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    reason = (
        f"is not in the trash of {root}, only {shown}" if runs else f"is not in the trash of {root}, which is empty"
    )
    raise UsageError.one(reference, f"{reason}{did_you_mean(reference, names)}", code="unknown-run")


def restore_run(root: Path, run: TrashedRun, name: str | None = None) -> RunFolder:
    """Move a run from the trash back to the runs folder, by default with its name before.

    Raises UsageError if the name is invalid, in use or stands for the newest run, or if the run cannot be moved.
    """
    target = run.name if name is None else check_new_name(name)
    advice = f"restore it under another name with `gputrain runs restore {shlex.quote(run.entry)} NAME`"
    if target == LAST_RUN:
        raise UsageError.one(target, "is reserved: it stands for the newest run", advice, code="invalid-name")
    with file_errors(run.entry, "cannot be restored", code="not-writable"):
        return RunFolder(move_folder(run.path, root, target, advice))


def delete_for_good(run: TrashedRun) -> None:
    """Delete a run in the trash.

    Raises UsageError if a process owns it, which resumed it there, or if a file cannot be deleted.
    """
    if not _is_own_folder(run.path.parent):
        raise UsageError.one(str(run.path.parent), "is no folder that only you can change", code="foreign-writable")
    with file_errors(run.entry, "cannot be deleted", code="not-writable"), locked_ended_run(RunFolder(run.path)):
        # rmtree opens each folder without following links, so nobody can lead it elsewhere.
        shutil.rmtree(run.path)


def _entry(path: Path) -> TrashedRun:
    # A rename sets the time of the last status change.
    return TrashedRun(_NUMBER.sub("", path.name), path.name, path, path.lstat().st_ctime)


def _trash_candidates(root: Path) -> tuple[Path, Path]:
    return root / TRASH_FOLDER, root / f"{TRASH_FOLDER}-{os.geteuid()}"


def _is_own_folder(path: Path) -> bool:
    """Whether a path is a folder, no link, that only this user can change."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and foreign_reason(status, trust_root=False) is None
    return False


def _make_trash(root: Path) -> Path:
    """Return the trash, created if it does not exist. Raises OSError, and UsageError if others can change it."""
    for path in _trash_candidates(root):
        if not os.path.lexists(path):
            path.mkdir(0o700)
        if _is_own_folder(path):
            return path
    raise UsageError.one(
        str(path), "is no folder that only you can change", "rename or remove it", code="foreign-writable"
    )
