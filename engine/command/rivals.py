"""Which metric files are those of a command, and not of another one that runs in the same folder at the same time.

/proc shows who writes a file that is open. A file that is opened for an instant, as those of Lightning and ultralytics,
may be anybody's, unless a command names it. Called by `metric_files`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Set
from pathlib import Path

from engine.command.membership import processes_by_run
from engine.utils.process_table import read_proc

# Reads the environments of all processes, 10 ms for 100.
LOOK_SECONDS = 5.0


class Rivals:
    """The commands of other runs of this user that have run in the folder `cwd` at the same time."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._found = False
        self._next_look = 0.0

    def exist(self, members: Set[int]) -> bool:
        """Return whether there are any. `members` are the processes of the own command.

        A rival that has ended counts, because its files look like own ones.
        """
        if not self._found and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            others = ({process.pid for process in processes} for processes in processes_by_run().values())
            self._found = any(members.isdisjoint(pids) and any(map(self._runs_here, pids)) for pids in others)
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
