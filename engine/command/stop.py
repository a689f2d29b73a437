"""The end of a command: which signals its processes get, in which order, and how long each may take.

The command itself is asked first, because it knows what to save and which processes are its own. What remains after
its end was left behind by a crash, or by a program that puts itself into the background.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from engine.command.keeper import KILL_SECONDS
from engine.command.membership import signal_all
from engine.command.process_tree import CommandProcess
from engine.utils.process_table import ProcessId, is_own, read_stat
from engine.utils.text import list_names, printable

# torchrun forwards the signal to its ranks and kills them after 30 s.
STOP_GRACE_SECONDS = 35.0
# For the processes of a command that has ended.
LEFTOVER_GRACE_SECONDS = 5.0
# After SIGKILL. The driver needs seconds to free the memory of several GPUs.
KILL_GRACE_SECONDS = 30.0
POLL_SECONDS = 0.05


class Step(IntEnum):
    """What the processes of a command were sent last."""

    NONE = 0
    STOP = 1
    """The stop signal, to the process group of the command."""
    TERMINATE = 2
    """SIGTERM, to all processes."""
    KILL = 3
    """SIGKILL, to all processes."""


class StopSequence:
    """Ends a command on request, and in any case what it leaves behind. The supervisor calls `poll` in its loop.

    `left_behind` are the names and IDs of the processes that were there when the command itself had ended, for a
    message.
    """

    def __init__(
        self,
        process: CommandProcess,
        stop_signal: int = signal.SIGINT,
        *,
        grace_s: float = STOP_GRACE_SECONDS,
        leftover_grace_s: float = LEFTOVER_GRACE_SECONDS,
        kill_grace_s: float = KILL_GRACE_SECONDS,
    ) -> None:
        self._process, self._stop_signal = process, stop_signal
        self._grace_s, self._leftover_grace_s, self._kill_grace_s = grace_s, leftover_grace_s, kill_grace_s
        self._next_step_at = math.inf
        self._has_ended = False
        self._terminated: set[ProcessId] = set()
        self.step = Step.NONE
        self.left_behind: Sequence[str] = ()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next step; None if none is due."""
        return None if self._next_step_at == math.inf else max(self._next_step_at - time.monotonic(), 0.0)

    def request(self) -> None:
        """Ask the command to stop. Another request kills all of its processes at once."""
        self._take(Step.STOP if self.step is Step.NONE else Step.KILL)

    def poll(self) -> bool:
        """Take the next step if it is due. Return whether all processes have ended, as far as they can be killed.

        The command itself may be one that cannot: `engine.command.process_tree` returns what is left."""
        if self._process.poll() is not None:
            members = self._process.members()
            if not members:
                return True
            if not self._has_ended:
                self._has_ended, self.left_behind = True, list(map(_describe, members))
                grace_s = 0.0 if self.step is Step.NONE else self._leftover_grace_s
                self._next_step_at = min(self._next_step_at, time.monotonic() + grace_s)
        if self.step >= Step.TERMINATE:
            self._end_all()
        if time.monotonic() < self._next_step_at:
            return False
        if self.step is Step.KILL:
            return True
        self._take(Step.KILL if self.step is Step.TERMINATE else Step.TERMINATE)
        return False

    def _take(self, step: Step) -> None:
        self.step = step
        if step is Step.STOP:
            self._process.signal_group(self._stop_signal)
        else:
            self._end_all()
        grace_s = self._leftover_grace_s if self._has_ended else self._grace_s
        self._next_step_at = time.monotonic() + (self._kill_grace_s if step is Step.KILL else grace_s)

    def _end_all(self) -> None:
        """Signal all processes, also those that have been started since the last call."""
        if self.step is Step.KILL:
            self._process.end_all(signal.SIGKILL)
            return
        # A handler of SIGTERM that saves something must not be called twice.
        members = [member for member in self._process.members() if member not in self._terminated]
        signal_all(members, signal.SIGTERM)
        self._terminated.update(members)


def _describe(process: ProcessId) -> str:
    status = read_stat(process.pid)
    return f"{printable(status.name) if status is not None else '?'} ({process.pid})"


def describe_unkillable(processes: Iterable[ProcessId]) -> str:
    """Return which processes SIGKILL has not ended, why, and when they end, as a sentence without its period."""
    by_reason: dict[str, list[str]] = {}
    for process in processes:
        by_reason.setdefault(_unkillable_reason(process), []).append(_describe(process))
    return "; ".join(
        f"{'process' if len(names) == 1 else 'processes'} {list_names(names)} cannot be killed: {reason}"
        for reason, names in by_reason.items()
    )


def _unkillable_reason(process: ProcessId) -> str:
    status = read_stat(process.pid)
    if status is not None and status.state == "D":
        # The kernel does not tell which: /proc/PID/stack is for root, and wchan is empty in most kernels.
        return "blocked on I/O (a disk, a file server or a GPU) until that returns"
    if status is not None and not is_own(process.pid):
        return "owned by another user"
    return "the kernel has not ended it yet"


def end_processes(find: Callable[[], list[ProcessId]], grace_s: float = LEFTOVER_GRACE_SECONDS) -> list[ProcessId]:
    """End the processes that `find` returns, also those that they start meanwhile. Return what cannot be killed."""
    signal_all(find(), signal.SIGTERM)
    kill_at = time.monotonic() + grace_s
    while survivors := find():
        if time.monotonic() > kill_at + KILL_SECONDS:
            break
        if time.monotonic() > kill_at:
            signal_all(survivors, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return survivors
