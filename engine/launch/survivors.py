"""Processes of a command that outlive its supervisor: `gputrain runs` names them, and `gputrain stop` ends them.

The keeper of a command kills them when the supervisor ends, so there are some only if it was killed, too, or if they
cannot be killed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from engine.command.membership import find_members, processes_by_run
from engine.command.run_id import last_run_id
from engine.command.spec import has_command
from engine.command.stop import end_processes
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.process_table import ProcessId
from engine.utils.text import list_names


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
    run_id = last_run_id(folder)
    if run_id is not None and (found := find_members(run_id)):
        pids = list_names([str(process.pid) for process in found])
        advice = f"end them first: gputrain stop {shlex.quote(folder.name)}"
        raise UsageError.one(folder.name, f"processes of its last start go on ({pids})", advice, code="process-left")


def stop_survivors(folder: RunFolder) -> tuple[int, list[ProcessId]]:
    """End the processes of a run without an owner. Return how many there were, and those that cannot be killed."""
    run_id = _ownerless_run_id(folder)
    if run_id is None or not (found := find_members(run_id)):
        return 0, []
    return len(found), end_processes(lambda: find_members(run_id))


def _ownerless_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of a command without an owner, as `last_run_id` does; None if it has one."""
    return last_run_id(folder) if has_command(folder) and folder.is_own and not folder.is_owned() else None
