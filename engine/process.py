"""What a process of a run asks of the system: to end with its parent, to keep off the terminal, to hear signals."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the one that started it ends, however that comes about. `parent` is that
    one's pid, in case it has gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def redirect_output(log: Path | None) -> None:
    """Send this process's output to the end of a log; without one, to where its errors go."""
    sys.stdout.flush()
    sys.stderr.flush()
    if log is None:
        os.dup2(2, 1)
        return
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def leave(code: int) -> None:
    """End this process now. The interpreter's own end would take a second with torch loaded."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
    os._exit(code)


class Signals:
    """What signals ask of a supervisor: SIGINT and SIGTERM to stop, a second SIGINT to kill. SIGHUP is ignored, by the
    ranks too, for it is ignored when they are started."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.kill = False

    def install(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.by == "SIGINT":
            self.kill = True
        self.by = signal.Signals(number).name
