"""Which metric files are those of a command, and not of another one that runs in the same folder at the same time.

/proc shows who writes a file that is open. Lightning and ultralytics open theirs for an instant; the parameters beside
them identify their command. Called by `metric_files`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from engine.base.process_table import read_proc
from engine.jobs.command.inner_commands import argument_parameters
from engine.jobs.command.membership import processes_by_run
from engine.watch.parameters import Parameters, read_parameters
from engine.watch.reading import Log, parse_number
from engine.watch.trainer_state import state_parameters

# Reads the environments of all processes, 10 ms for 100.
LOOK_SECONDS = 5.0


class Rivals:
    """The commands of other runs of this user that have run in the folder `cwd` at the same time."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._found: list[Parameters] = []
        self._next_look = 0.0

    def find(self, members: Set[int]) -> list[Parameters]:
        """Return their arguments. `members` are the processes of the own command.

        A rival that has ended counts, because its files look like own ones.
        """
        if time.monotonic() < self._next_look:
            return self._found
        self._next_look = time.monotonic() + LOOK_SECONDS
        for processes in processes_by_run().values():
            pids = [process.pid for process in sorted(processes, key=lambda each: (each.start_ticks, each.pid))]
            if not members.isdisjoint(pids) or not any(map(self._runs_here, pids)):
                continue
            # The keeper is the first one, and has no arguments that are parameters.
            arguments: Parameters = next(filter(None, map(_arguments_of, pids)), {})
            if arguments not in self._found:
                self._found.append(arguments)
        return self._found

    def names_file(self, files: Iterable[Path], members: Iterable[int]) -> bool:
        """Whether an argument of the own command is one of the files, or the folder of one."""
        places = {os.path.realpath(place) for file in files for place in (file, file.parent)} - {
            os.path.realpath(self._cwd)
        }
        words = (word for pid in members for word in _words_of(pid)[1:])
        return any(os.path.realpath(self._cwd / os.fsdecode(word)) in places for word in words if word)

    def _runs_here(self, pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/cwd").samefile(self._cwd)
        except OSError:
            return False


def _words_of(pid: int) -> list[bytes]:
    return read_proc(pid, "cmdline").removesuffix(b"\0").split(b"\0")


def _arguments_of(pid: int) -> Parameters:
    return argument_parameters([os.fsdecode(word) for word in _words_of(pid)])


def has_arguments(log: Log, arguments: Mapping[str, object], rivals: Iterable[Mapping[str, object]]) -> bool:
    """Whether a log or the files beside it have parameters of this command, and contradict those of each of the
    `rivals`."""
    stored = read_parameters(log.files[0].parent) | state_parameters(log.files[0])
    return _fit(stored, arguments) is True and all(_fit(stored, others) is False for others in rivals)


def _fit(stored: Mapping[str, object], arguments: Mapping[str, object]) -> bool | None:
    """Return whether the parameters that both have are equal; None if they have none in common."""
    common = stored.keys() & arguments.keys()
    return all(_comparable(stored[name]) == _comparable(arguments[name]) for name in common) if common else None


def _comparable(value: object) -> object:
    """Return a parameter as a number if it is one: YAML reads 1e-05 as a text."""
    number = parse_number(str(value))
    return str(value) if number is None else number
