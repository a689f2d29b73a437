"""What a process of a run asks of the system: to end with its parent, to keep off the terminal, to hear signals."""

from __future__ import annotations

import ctypes
import getpass
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when the one that started it ends, however that comes about. `parent_pid` is that
    one's pid, in case it has gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


# Of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES = 2**31 - 1
# Older versions take no more than the second.
_MMAP_THRESHOLDS_BYTES = (2**30, 2**25)


def keep_freed_memory() -> None:
    """Let what is freed be used again. glibc gives large blocks back to the system at once, and each step of a training
    on the CPU would pay for their pages anew: a tenth to a fifth of its time."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS_BYTES):
            mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


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


def exit_now(code: int) -> None:
    """End this process now. The interpreter's own end would take a second with torch loaded."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
    os._exit(code)


def user_name() -> str:
    """Who this process belongs to; a container's user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SignalHandler:
    """What signals ask of a supervisor: SIGINT, SIGTERM and SIGUSR1, which SLURM sends ahead of its time limit, to
    stop; a second SIGINT to kill."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.kill_requested = False
        self.time_limit_near = False
        """SIGUSR1 came: the time of the job is nearly over."""
        self._interrupted = False

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.kill_requested = self.kill_requested or (number == signal.SIGINT and self._interrupted)
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.time_limit_near = self.time_limit_near or number == signal.SIGUSR1
        self.signal_name = signal.Signals(number).name


def ignore_sighup() -> None:
    """Ignore the end of the terminal or of the SSH session; so do the processes that this one starts."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
