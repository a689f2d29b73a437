"""Processes of a command that outlive its supervisor: `gputrain runs` names them, and `gputrain stop` ends them.

The keeper of a command kills them when the supervisor ends, so there are some only if it was killed, too, or if they
cannot be killed. Each carries the ID of the start: the name of the run, random digits, and the inode of the run folder.
So the copy of a run folder names no process, and a run that was renamed names its own.
"""

from __future__ import annotations

import secrets
import shlex
import signal
import time
from collections.abc import Iterable

from engine.base.errors import UsageError
from engine.base.process_table import ProcessId
from engine.base.text import list_names
from engine.jobs.command.keeper import KILL_SECONDS
from engine.jobs.command.membership import find_members, processes_by_run, signal_all
from engine.jobs.command.process_tree import LEFTOVER_GRACE_SECONDS
from engine.jobs.command.spec import has_command
from engine.runs.folder import RunFolder

HALF_DIGITS = 16
LEFTOVER_POLL_SECONDS = 0.05


def make_run_id(folder: RunFolder) -> str:
    """Return a unique ID for a start of the command in a folder."""
    return f"{folder.name}-{secrets.token_hex(HALF_DIGITS // 2)}{_inode_digits(folder)}"


def find_survivors(folders: Iterable[RunFolder]) -> dict[RunFolder, list[ProcessId]]:
    """Return the processes of runs without an owner. A folder that others can change, or a copy, names none."""
    marked, found = processes_by_run(), dict[RunFolder, list[ProcessId]]()
    for folder in folders:
        # Journals are read only if there is something to find.
        run_id = _ownerless_run_id(folder) if marked else None
        if run_id is not None and run_id in marked and (left := find_members(run_id)):
            found[folder] = left
    return found


def check_survivors(folder: RunFolder) -> None:
    """Raise UsageError if processes of the last start of a run go on, before its owner starts the command again."""
    run_id = _last_run_id(folder)
    if run_id is not None and (found := find_members(run_id)):
        pids = list_names([str(process.pid) for process in found])
        advice = f"end them first: gputrain stop {shlex.quote(folder.name)}"
        raise UsageError.one(folder.name, f"processes of its last start go on ({pids})", advice, code="process-left")


def stop_survivors(folder: RunFolder, grace_s: float = LEFTOVER_GRACE_SECONDS) -> tuple[int, list[ProcessId]]:
    """End the processes of a run without an owner, also those that they start meanwhile.

    Return how many there were, and those that cannot be killed.
    """
    run_id = _ownerless_run_id(folder)
    if run_id is None or not (left := find_members(run_id)):
        return 0, []
    count, kill_at = len(left), time.monotonic() + grace_s
    signal_all(left, signal.SIGTERM)
    while (left := find_members(run_id)) and time.monotonic() < kill_at + KILL_SECONDS:
        if time.monotonic() > kill_at:
            signal_all(left, signal.SIGKILL)
        time.sleep(LEFTOVER_POLL_SECONDS)
    return count, left


def _ownerless_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of a command without an owner, as `_last_run_id` does; None if it has one."""
    return _last_run_id(folder) if has_command(folder) and folder.is_own and not folder.is_owned() else None


def _last_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of the command in a folder; None if it was made for another folder, or if
    somebody else can change that."""
    command = folder.history().command if folder.is_own else None
    return command.run_id if command is not None and command.run_id.endswith(_inode_digits(folder)) else None


def _inode_digits(folder: RunFolder) -> str:
    return f"{folder.status().st_ino:0{HALF_DIGITS}x}"
