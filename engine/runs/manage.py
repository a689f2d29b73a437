"""Rename runs that have ended. `engine.runs.labels` archives and tags them, `engine.runs.trash` deletes them.

A run is renamed under its lock, so that no process resumes it meanwhile.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from engine.config.run_name import name_problem, normalize_name
from engine.runs.find import find_run
from engine.runs.folder import RunFolder
from engine.runs.ownership import locked_ended_run
from engine.runs.root import LAST_RUN, is_run_folder
from engine.runs.run_config import read_stored_config
from engine.utils.errors import UsageError
from engine.utils.files import replace_file


def rename_run(folder: RunFolder, name: str) -> RunFolder:
    """Rename a run that has ended: its folder, and `run.name` in its config. Return the new folder.

    The journal keeps the name that each session had. Raises UsageError if the name is invalid or in use, if the run is
    live, or if other users can change it.
    """
    name = check_new_name(name)
    folder.require_own(trust_owner=False, can_trust=False)
    if name == folder.name:
        raise UsageError.one(name, "is the name that the run has", code="name-in-use")
    root = folder.path.parent
    try:
        with locked_ended_run(folder):
            _store_name(RunFolder(move_folder(folder.path, root, name)), name)
    except FileExistsError as error:
        raise UsageError.one(name, f"already exists in {root}", "use another name", code="name-in-use") from error
    except OSError as error:
        raise UsageError.one(folder.name, f"cannot be renamed: {error.strerror}", code="not-writable") from error
    return RunFolder(root / name)


def check_new_name(name: str) -> str:
    """Return the normalized name. Raises UsageError if a run cannot have it."""
    name = normalize_name(name)
    if (problem := name_problem(name)) is not None:
        raise UsageError.one(name, f"is not a valid name of a run: {problem}", code="invalid-name")
    if name == LAST_RUN:
        raise UsageError.one(name, "is reserved: it stands for the newest run", "use another name", code="invalid-name")
    return name


def move_folder(source: Path, target_folder: Path, name: str) -> Path:
    """Rename a folder without replacing anything. Raises FileExistsError if the name is in use, and OSError."""
    target = target_folder / name
    # rename(2) replaces an empty folder, such as one that a new run has just made, but mkdir(2) fails.
    target.mkdir(0o700)
    try:
        source.rename(target)
    except OSError:
        with suppress(OSError):
            target.rmdir()
        raise
    return target


def _store_name(folder: RunFolder, name: str) -> None:
    """Write the name to the config. The list is sorted by the time of the config, so that is kept."""
    from engine.config.yaml_io import MAX_CONFIG_BYTES, to_yaml

    values = read_stored_config(folder.config, MAX_CONFIG_BYTES)
    if values is None or not isinstance(values.get("run"), dict):
        # The name of the folder counts. A config that nobody can read has no use for it.
        return
    values["run"]["name"] = name
    text = to_yaml(values)
    before = folder.config.stat()
    replace_file(folder.config, lambda file: file.write(text.encode()), durable=True)
    folder.config.chmod(before.st_mode & 0o777)
    os.utime(folder.config, ns=(before.st_atime_ns, before.st_mtime_ns))


def find_own_run(root: Path, reference: str) -> RunFolder:
    """Return a run of this user by name, path or `last`. Raises UsageError as `find_run` does.

    Unlike `find_run`, it accepts a run that contains links: they are moved, and never followed.
    """
    for path in (root / reference, Path(os.path.realpath(reference))):
        if reference != LAST_RUN and is_run_folder(path) and path.parent != path:
            return RunFolder(path)
    return find_run(root, reference)
