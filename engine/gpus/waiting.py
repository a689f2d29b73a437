"""A waiting run that becomes a small process (`sleeper`), and the program that it becomes again.

`allocation` decides when a run sleeps, `engine.launch.phases` which locks and commands it sleeps with.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import NoReturn

from engine.gpus import sleeper
from engine.gpus.reservation_entry import ReservationInfo, reservations_root
from engine.gpus.sleeper import Leadership
from engine.utils.locks import inherit

# A run that was woken passes others that do not take their GPUs only after `run_queue.CLAIM_TIMEOUT_SECONDS`.
AWAKE_SECONDS = 20.0


@dataclass(frozen=True)
class Bed:
    """What a run sleeps with: the command that continues it, descriptors of its folder and of the two files of its
    lock, and those of the folders of the runs that it waits for."""

    command: Sequence[str]
    folder_fd: int
    lock_fds: tuple[int, int]
    followed: Sequence[int] = ()

    def close(self) -> None:
        """Close the descriptors of the folders."""
        for fd in (self.folder_fd, *self.followed):
            os.close(fd)


# Returns what the run sleeps with, None if it stays awake now.
MakeBed = Callable[[], Bed | None]


class FallAsleep(BaseException):
    """Leaves the loop that waits, so that it closes what it has opened."""


@dataclass(frozen=True)
class Woken:
    """What a process has kept while it slept: its reservation, and the leadership if it has taken that."""

    lock_path: Path
    lock_fd: int
    leadership: Leadership | None


_woken: Woken | None = None


def wake_up() -> None:
    """Take over what this process has kept while it slept. To be called before anything asks who owns the run."""
    global _woken
    if (text := os.environ.pop(sleeper.VARIABLE, None)) is None:
        return
    with suppress(ValueError, SyntaxError, KeyError, TypeError, OSError):
        spec = ast.literal_eval(text)
        inherit(*spec["lock_fds"])
        path, lock_fd = spec["reservation"]
        leadership = Leadership(tuple(spec["leadership"])) if spec["leadership"] else None
        for fd in (lock_fd, *(leadership.fds if leadership else ())):
            os.set_inheritable(fd, False)
        _woken = Woken(Path(path), lock_fd, leadership)


def receive_signals() -> None:
    """Receive the signals that have arrived since this process fell asleep."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, sleeper.SIGNALS)


def take_woken() -> Woken | None:
    """Return what this process has kept, once."""
    global _woken
    woken, _woken = _woken, None
    return woken


def wake_sleepers(entries: Iterable[ReservationInfo]) -> None:
    """Wake runs of this user; those that do not sleep do not notice."""
    for each in entries:
        path = reservations_root() / each.user_folder / each.lock_name
        with suppress(OSError):
            sleeper.wake(str(path.with_suffix(".folder")))


def fall_asleep(bed: Bed, lock_path: Path, lock_fd: int, leader: str, begin: float) -> NoReturn:
    """Become the small process. Raises OSError, and stays awake then."""
    followed = [(fd, sleeper.is_live(fd)) for fd in bed.followed]
    spec = {
        "argv": list(bed.command),
        "folder_fd": bed.folder_fd,
        "lock_fds": bed.lock_fds,
        "reservation": (str(lock_path), lock_fd),
        "leader": leader,
        "leadership": None,
        "followed": followed,
        "begin": begin,
    }
    kept = (bed.folder_fd, *bed.lock_fds, lock_fd, *bed.followed)
    signal.pthread_sigmask(signal.SIG_BLOCK, sleeper.SIGNALS)
    for fd in kept:
        os.set_inheritable(fd, True)
    try:
        # Compiling takes memory that stays allocated.
        compiled = cache_from_source(sleeper.__file__)
        file = compiled if os.access(compiled, os.R_OK) else sleeper.__file__
        program = [sys.executable, "-I", "-S", file]
        os.execve(program[0], program, os.environ | {sleeper.VARIABLE: repr(spec)})  # noqa: S606 - our own program
    finally:
        for fd in kept:
            os.set_inheritable(fd, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, sleeper.SIGNALS)
