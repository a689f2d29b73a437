"""Processes of a command that outlive its supervisor: `gputrain runs` names them, and `gputrain stop` ends them.

The keeper of a command kills them when the supervisor ends, so there are some only if it was killed, too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from engine.command.membership import processes_by_run
from engine.command.orphans import ownerless_run_id
from engine.command.process_tree import find_marked
from engine.command.stop import end_survivors
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.process_table import ProcessId
from engine.utils.text import list_names


def find_survivors(folders: Iterable[RunFolder]) -> dict[RunFolder, list[ProcessId]]:
    """Return the processes of runs without an owner. A folder that others can change names none."""
    found = processes_by_run()
    # Journals are read only if there is something to find.
    run_ids = {folder: ownerless_run_id(folder) for folder in folders} if found else {}
    return {folder: found[run_id] for folder, run_id in run_ids.items() if run_id in found}


def check_survivors(folder: RunFolder) -> None:
    """Raise UsageError if processes of the last start of a run go on, before its owner starts the command again."""
    command = folder.history().command
    if command is not None and folder.is_own and (found := find_marked(command.run_id)):
        pids = list_names([str(process.pid) for process in found])
        advice = f"end them first: gputrain stop {shlex.quote(folder.name)}"
        raise UsageError.one(folder.name, f"processes of its last start go on ({pids})", advice, code="process-left")


def stop_survivors(folder: RunFolder) -> tuple[int, list[ProcessId]]:
    """End the processes of a run without an owner. Return how many there were, and those that cannot be killed."""
    run_id = ownerless_run_id(folder)
    found = [] if run_id is None else find_marked(run_id)
    return (len(found), end_survivors(run_id)) if run_id is not None and found else (0, [])
