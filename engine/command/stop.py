"""The end of a command: which signals its processes get, in which order, and how long each may take.

The command itself is asked first, because it knows what to save and which processes are its own. What remains after
its end was left behind by a crash, or by a program that puts itself into the background.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from enum import IntEnum

from engine.command.process_tree import CommandProcess
from engine.utils.process_table import ProcessId, read_stat
from engine.utils.text import list_names, printable

# torchrun forwards the signal to its ranks and kills them after 30 s.
STOP_GRACE_SECONDS = 35.0
# For the processes of a command that has ended.
LEFTOVER_GRACE_SECONDS = 5.0
# After SIGKILL. The driver needs seconds to free the memory of several GPUs.
KILL_GRACE_SECONDS = 30.0


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
        self._process, self.stop_signal = process, stop_signal
        self._grace_s, self._leftover_grace_s, self._kill_grace_s = grace_s, leftover_grace_s, kill_grace_s
        self._next_step_at = math.inf
        self._has_ended = False
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
        if self.step is Step.KILL:
            # What has been started since the last call.
            self._process.end_all(signal.SIGKILL)
        if time.monotonic() < self._next_step_at:
            return False
        if self.step is Step.KILL:
            return True
        self._take(Step.KILL if self.step is Step.TERMINATE else Step.TERMINATE)
        return False

    def _take(self, step: Step) -> None:
        self.step = step
        if step is Step.STOP:
            self._process.signal_group(self.stop_signal)
        else:
            self._process.end_all(signal.SIGKILL if step is Step.KILL else signal.SIGTERM)
        grace_s = self._leftover_grace_s if self._has_ended else self._grace_s
        self._next_step_at = time.monotonic() + (self._kill_grace_s if step is Step.KILL else grace_s)


def _describe(process: ProcessId) -> str:
    status = read_stat(process.pid)
    return f"{printable(status.name) if status is not None else '?'} ({process.pid})"


def describe_unkillable(processes: Sequence[ProcessId]) -> str:
    """Return which processes SIGKILL has not ended, why, and when they end, as a sentence without its period."""
    names = list_names(list(map(_describe, processes)))
    statuses = [read_stat(process.pid) for process in processes]
    # The kernel does not tell which: /proc/PID/stack is for root, and wchan is empty in most kernels.
    is_blocked = any(status is not None and status.state == "D" for status in statuses)
    reason = "blocked on I/O (a disk, a file server or a GPU)" if is_blocked else "the kernel has not ended it yet"
    return f"{'process' if len(processes) == 1 else 'processes'} {names} cannot be killed: {reason}"
