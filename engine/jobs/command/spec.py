"""The command of a run, `RUN/command.json`: what `gputrain run -- COMMAND` starts, where, and with which environment.

`tui.cli` makes it of a typed line, `engine.jobs.launch.program_run` stores it once the run folder is claimed, and reads
it again to resume the run. It holds secrets and it is code, so only its user may read it and nobody else may have
written it.
"""

from __future__ import annotations

import os
import signal
import stat
from typing import Annotated

from engine.base.codec import (
    ENTRIES,
    FileNumber,
    FileRecord,
    InvalidRecordError,
    Meta,
    decode,
    field,
    replace,
    write_record,
)
from engine.base.errors import UsageError
from engine.base.files import is_file, read_file
from engine.base.trust import foreign_reason
from engine.runs.folder import RunFolder
from engine.runs.run_record import read_run_record

# The kernel accepts arguments and an environment of 2 MiB together (execve(2)); JSON escapes some characters.
MAX_COMMAND_BYTES = 1 << 24
# Signals that a program can handle.
STOP_SIGNALS = tuple(each.name for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP))
# What the kernel passes to a program; the file may be anybody's.
Argument = Annotated[str, Meta(pattern=r"^[^\0]*\Z")]
VariableName = Annotated[str, Meta(pattern=r"^[^=\0]+\Z")]
AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\0]*\Z")]
StopSignal = Annotated[str, Meta(pattern=rf"^(?:{'|'.join(STOP_SIGNALS)})\Z")]


class Program(FileRecord, frozen=True, kw_only=True):
    """Content of `command.json`."""

    argv: Annotated[tuple[Argument, ...], ENTRIES, Meta(min_length=1)]
    """Program and arguments as typed, with placeholders such as {gpus}, see `engine.jobs.command.devices`."""
    cwd: AbsolutePath
    """Absolute path of the working folder."""
    cwd_inode: FileNumber
    """Inode of that folder when the command was typed: another folder may take its place until it starts."""
    environment: Annotated[dict[VariableName, Argument], ENTRIES] = field(default_factory=dict)
    """All variables of the command, without those that are set when it starts, such as CUDA_VISIBLE_DEVICES. Empty once
    the run has finished."""
    expanded: Annotated[tuple[str, ...], ENTRIES] = ()
    """Names of the variables whose values were typed with `--env`, so that they may have placeholders, too."""
    stop_signal: StopSignal = "SIGINT"
    """Name of the signal that asks the command to stop."""
    parse: Annotated[tuple[str, ...], ENTRIES] = ()
    """Regular expressions that find metrics in the output, beside those of `engine.watch.output_metrics`."""
    metrics: Annotated[tuple[str, ...], ENTRIES] = ()
    """Files and folders with its metrics; empty: those that appear below the working folder."""
    on_resume: Annotated[tuple[Argument, ...], ENTRIES] = ()
    """Arguments that follow those of `argv` when the command starts again in the same run, with the same
    placeholders."""

    def has_same_program(self, other: Program) -> bool:
        """Whether both start the same program with the same arguments in the same folder. What surrounds it may
        differ: variables, metrics, and the arguments of a resume."""
        return (self.argv, self.cwd) == (other.argv, other.cwd)


def write_command(folder: RunFolder, command: Program) -> None:
    """Store a command, readable for its user only. Raises OSError."""
    write_record(folder.command, command, private=True)


def has_command(folder: RunFolder) -> bool:
    """Whether a run is that of a command. Without its file, the record says so."""
    if is_file(folder.command):
        return True
    record = read_run_record(folder)
    return record is not None and record.command != ""


def read_command(folder: RunFolder) -> Program:
    """Return the stored command. Raises UsageError if it is missing or damaged."""
    try:
        data, _ = read_file(folder.command, MAX_COMMAND_BYTES)
        return decode(data, Program)
    except OSError as error:
        raise _unusable(folder, f"cannot be read: {error.strerror}", "not-readable") from error
    except InvalidRecordError as error:
        raise _unusable(folder, str(error), error.code) from error


def foreign_command_reason(folder: RunFolder) -> str | None:
    """Return why somebody else may have written a stored command, as a clause that follows its name; None if only this
    user can."""
    try:
        status = os.lstat(folder.command)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return foreign_reason(status, trust_root=False)


def forget_environment(folder: RunFolder, command: Program) -> None:
    """Delete the environment of a command that does not start again. Raises OSError."""
    write_command(folder, replace(command, environment={}))


def _unusable(folder: RunFolder, reason: str, code: str) -> UsageError:
    return UsageError.one(str(folder.command), reason, "start the command again as a new run", code=code)
