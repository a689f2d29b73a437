"""The code of a run in the process that owns it: recorded when the run is made, compared or copied when it starts.

`engine.jobs.launch.phases` calls it for trainings and for commands. The code of a command is that around its working
folder, the code of a training that of its user code (`run.code`). A training without user code has none: its code is
gputrain, whose version each session records.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base import codec
from engine.base.errors import UsageError, file_errors
from engine.base.files import file_number, is_file
from engine.base.text import printable
from engine.runs.command_events import MAX_EVENT_FILES, CodeChanged, CodeRecorded
from engine.runs.events import WarningEvent
from engine.runs.folder import CODE_COPY, CODE_RECORD, RunFolder

if TYPE_CHECKING:
    from engine.jobs.code.record import CodeRecord
    from engine.jobs.command.spec import Program


def copied_folder(code: CodeRecord | None, folder: RunFolder) -> Path | None:
    """Return the working folder of a run in its copy of the code; None without a copy."""
    return folder.path / folder.code.name / CODE_COPY / code.folder if code is not None and code.snapshot else None


def record_code(
    folder: RunFolder, cwd: Path, *, snapshot: bool
) -> tuple[CodeRecord | None, CodeRecorded | WarningEvent | None]:
    """Record the code around the working folder of a new run. Return it, and the event that reports it or says why it
    is not recorded; twice None outside of git. Raises UsageError if there can be no copy."""
    # Most folders with a run are in a repository, but a run on a file server must not wait for this twice.
    from engine.jobs.code.git import GitError
    from engine.jobs.code.record import capture_code

    try:
        record = capture_code(folder, cwd, snapshot=snapshot)
    except (GitError, OSError) as error:
        shutil.rmtree(folder.code, ignore_errors=True)
        reason = f"{printable(str(cwd))} {error}" if isinstance(error, GitError) else str(error.strerror)
        code = error.code if isinstance(error, GitError) else "not-recorded"
        if snapshot:
            raise UsageError.one("run.snapshot", f"the code cannot be copied: {reason}", code=code) from error
        return None, WarningEvent(message=f"the code is not recorded: {reason}", code=code)
    if record is None:
        return None, None
    files = [*record.digests.changed, *record.digests.untracked]
    linked = list(record.linked[:MAX_EVENT_FILES])
    return record, CodeRecorded(code=record.summary(), changed=files[:MAX_EVENT_FILES], linked=linked)


def stored_code(folder: RunFolder) -> CodeRecord | None:
    """Return the code of a run that is resumed, None if there is none or it is damaged."""
    if not is_file(folder.code / CODE_RECORD):
        return None
    from engine.jobs.code.record import read_code_record

    return read_code_record(folder)


def code_changed(code: CodeRecord | None, folder: RunFolder, cwd: Path, known: str) -> CodeChanged | None:
    """Return how the code differs from that with which the run was made; None if that is `known` or not recorded."""
    if code is None or code.snapshot:
        return None
    from engine.jobs.code.git import GitError
    from engine.jobs.code.record import find_change

    try:
        change = find_change(code, cwd, folder.path.parent)
    except GitError as error:
        change = CodeChanged(message=f"{printable(str(cwd))} {error}", files=[])
    return None if change.message == known else change


def copied_command(command: Program, code: CodeRecord | None, folder: RunFolder) -> Program:
    """Return a command with the paths in the copy of its code: its working folder, absolute paths among its arguments,
    and where Python finds the packages of the repository."""
    place = copied_folder(code, folder)
    if code is None or place is None:
        return command
    copy = _Copy(Path(code.root), folder.path / folder.code.name / CODE_COPY)
    failure = f"{printable(str(place))}, the copy of the code, cannot be used"
    with file_errors("run.snapshot", failure, "start a new run", code="not-found"):
        inode = file_number(place.stat().st_ino)
    # The first word may be an interpreter of the repository's own environment, which is no part of the copy.
    argv = [copy.argument(word) for word in command.argv]
    return codec.replace(
        command, argv=tuple(argv), cwd=str(place), cwd_inode=inode, environment=copy.environment(command, place)
    )


@dataclass(frozen=True)
class _Copy:
    """A copy of the working tree `root`."""

    root: Path
    copy: Path

    def argument(self, word: str) -> str:
        """Return an argument with its path in the copy, also behind `=`."""
        option, sign, path = word.partition("=")
        if sign and not word.startswith("/"):
            return f"{option}={self.path_of(path) or path}"
        return self.path_of(word) or word

    def path_of(self, path: str) -> str | None:
        """Return where an absolute path is in the copy; None if it is not below the tree, or only linked."""
        if not path.startswith("/"):
            return None
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.root):
            return None
        place = self.copy / real.relative_to(self.root)
        is_copied = os.path.realpath(place) == str(Path(os.path.realpath(self.copy)) / real.relative_to(self.root))
        return str(place) if is_copied and os.path.lexists(place) else None

    def environment(self, command: Program, place: Path) -> Mapping[str, str]:
        """Return the environment of a command with the paths in the copy."""
        variables = dict(command.environment)
        given = variables.get("PYTHONPATH", "").split(os.pathsep)
        paths = [copied for each in _source_folders(self.root) if (copied := self.path_of(each))]
        paths += [self.path_of(each) or each for each in given if each]
        if paths:
            variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        if "PWD" in variables:
            variables["PWD"] = str(place)
        # uv would install the copy into the environment of the original, to which `.venv` is a link.
        return {"UV_NO_SYNC": "1"} | variables


def _source_folders(root: Path) -> list[str]:
    """Return the folder of a repository from which its packages are imported if they are installed with
    `pip install -e`, whose paths lead to the original."""
    is_package = any((root / name).is_file() for name in ("pyproject.toml", "setup.py"))
    return [str(root / "src" if (root / "src").is_dir() else root)] if is_package else []
