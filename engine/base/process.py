"""Process setup: end with the parent, redirect output, handle signals, tune malloc. What identifies a process."""

from __future__ import annotations

import ctypes
import getpass
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from engine.base.files import append_to_file, read_text
from engine.base.process_table import read_stat

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make Linux kill this process when its parent ends (prctl PR_SET_PDEATHSIG).

    Exits immediately if the parent, whose pid is `parent_pid`, has already ended.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


# Parameters of mallopt(3) in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES = 2**31 - 1
# Older glibc versions accept no more than the second value.
_MMAP_THRESHOLDS_BYTES = (2**30, 2**25)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for reuse.

    By default glibc returns large blocks to the kernel, and page faults then take 10-20% of each training step on the
    CPU.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if any(mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_THRESHOLDS_BYTES):
            mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def redirect_output(log: Path | None) -> None:
    """Append stdout and stderr of this process to a log file. Without one, redirect stdout to stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    if log is None:
        os.dup2(2, 1)
        return
    handle = append_to_file(log)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


@contextmanager
def discarded_stdout() -> Iterator[None]:
    """Discard what this process writes to stdout in the context, also from C++."""
    with suppress(AttributeError, OSError):
        # A process may have no stdout, or one that nobody reads.
        sys.stdout.flush()
    try:
        stdout = os.dup(1)
    except OSError:
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def exit_now(code: int) -> None:
    """Exit without interpreter shutdown, which takes 1 s with torch loaded."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            continue
    os._exit(code)


def user_name() -> str:
    """Return the name of the user, or the user ID: in a container the user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@cache
def boot_id() -> str:
    """Return the ID of the current boot of the kernel, which containers on one host share; "" if it is unknown.

    See random(4). Some containers, such as those of systemd-nspawn, have an ID of their own.
    """
    return read_text(Path("/proc/sys/kernel/random/boot_id")).strip()


def seconds_since_boot() -> float:
    """Return the seconds since the boot, which no change of the system time affects. Includes suspended time."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def process_start_ticks(pid: int) -> int | None:
    """Return when a process of this PID namespace started, in clock ticks since the boot; None if it is unknown.

    Process ID, start and `boot_id` identify a process: process IDs are reused. See proc_pid_stat(5).
    """
    status = read_stat(pid)
    return None if status is None else status.start_ticks


def blocked_reason(pid: int, proc: Path = Path("/proc")) -> str:
    """Return a clause if a process is stopped or does not return from a call of the kernel; otherwise empty.

    The name of the kernel function, see proc_pid_wchan(5), tells a driver from a disk.
    """
    folder = proc / str(pid)
    # The name of the command, in parentheses, may contain any character.
    state = read_text(folder / "stat").rpartition(")")[2].split()[:1]
    if state in (["T"], ["t"]):
        return "its process is stopped (SIGSTOP)"
    waits_in = read_text(folder / "wchan").strip("0\n") or "disk I/O or a driver"
    return f"it is in a call of the kernel that does not return ({waits_in})" if state == ["D"] else ""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SignalHandler:
    """Records the stop requests by signal; the handler only sets flags, because more work in a handler can deadlock.

    SIGINT, SIGTERM and SIGUSR1, which Slurm sends before its time limit, request a stop; a second SIGINT requests a
    kill, which only a supervisor obeys.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.kill_requested = False
        self.time_limit_near = False
        """Whether SIGUSR1 was received: Slurm sends it shortly before the time limit of the job."""
        self._interrupted = False

    @property
    def is_set(self) -> bool:
        """Whether a stop was requested."""
        return self.signal_name is not None

    def install(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        """Install the handler for these signals."""
        for number in numbers:
            signal.signal(number, self.handle_signal)

    def request_stop(self, by: str) -> None:
        """Request a stop as a signal does; `by` says what requests it."""
        self.signal_name = self.signal_name or by

    def handle_signal(self, number: int, _: FrameType | None = None) -> None:
        self.kill_requested = self.kill_requested or (number == signal.SIGINT and self._interrupted)
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.time_limit_near = self.time_limit_near or number == signal.SIGUSR1
        self.signal_name = signal.Signals(number).name


def ignore_sighup() -> None:
    """Ignore SIGHUP, in this process and its future children, so that a run survives its terminal or SSH session."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
