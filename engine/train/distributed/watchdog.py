"""Heartbeats of the ranks in shared memory, and the watchdog that detects a run without progress.

Each rank writes its step and phase. The supervisor can read them while a rank hangs, so it can name that rank.
Under torchrun and srun each rank has a watchdog thread that sees only its own heartbeat.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum

from engine.base.codec import Count, Record

# The process group's timer starts when a rank enters a collective, the watchdog's at the last progress of any rank.
COLLECTIVE_TIMEOUT_MARGIN_SECONDS = 60.0
# torch counts in milliseconds and nanoseconds, which overflow for values that only mean "never".
MAX_COLLECTIVE_TIMEOUT_SECONDS = 10.0**8

_SLOT = struct.Struct("qqq")


class Phase(IntEnum):
    """Current activity of a rank. All ranks enter the same phases in the same order."""

    SETUP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    EVALUATION = 4
    REDUCE_METRICS = 5
    CHECKPOINT = 6
    PAUSED = 7
    PROFILE = 8

    @property
    def label(self) -> str:
        """The phase as a predicate, like "waiting for data"."""
        return _LABELS[self]


_LABELS = {
    Phase.SETUP: "setting up",
    Phase.DATA: "waiting for data",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.EVALUATION: "evaluating",
    Phase.REDUCE_METRICS: "reducing metrics over the ranks",
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.PAUSED: "paused",
    Phase.PROFILE: "writing a profile",
}


class Heartbeat(Record, frozen=True):
    """Progress of one rank: completed steps, further phases entered since then, and the current phase."""

    step: Count = 0
    phase_count: Count = 0
    phase: Phase = Phase.SETUP


class Heartbeats:
    """One heartbeat per rank in anonymous shared memory. Ranks inherit `fd` from the process that created it; the
    kernel frees the memory with the last process that maps it.

    Behind the heartbeats is one byte per rank: whether a thread of the rank is writing a checkpoint."""

    def __init__(self, num_ranks: int, fd: int | None = None) -> None:
        self._num_ranks = num_ranks
        self.fd = os.memfd_create("gputrain-heartbeats") if fd is None else fd
        size_bytes = num_ranks * (_SLOT.size + 1)
        if fd is None:
            os.ftruncate(self.fd, size_bytes)
        self._memory = mmap.mmap(self.fd, size_bytes)

    def write(self, rank: int, step: int, phase_count: int, phase: Phase) -> None:
        _SLOT.pack_into(self._memory, rank * _SLOT.size, step, phase_count, phase)

    def read(self) -> list[Heartbeat]:
        """Return the heartbeats of all ranks, in the order of the ranks."""
        slots = (_SLOT.unpack_from(self._memory, rank * _SLOT.size) for rank in range(self._num_ranks))
        return [Heartbeat(step, count, Phase(phase)) for step, count, phase in slots]

    def set_saving(self, rank: int, saving: bool) -> None:
        self._memory[self._num_ranks * _SLOT.size + rank] = saving

    def is_saving(self, rank: int) -> bool:
        """Whether a thread of the rank is writing a checkpoint, or was when its process died."""
        return bool(self._memory[self._num_ranks * _SLOT.size + rank])

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class HeartbeatWriter:
    """Writer of one rank's heartbeat."""

    def __init__(self, heartbeats: Heartbeats, rank: int) -> None:
        self._heartbeats, self._rank = heartbeats, rank
        self._step = self._phase_count = 0

    def enter_phase(self, step: int, phase: Phase) -> None:
        """Report that the rank has completed `step` steps and enters a phase."""
        self._phase_count = self._phase_count + 1 if step == self._step else 0
        self._step = step
        self._heartbeats.write(self._rank, step, self._phase_count, phase)

    def set_saving(self, saving: bool) -> None:
        """Report that a thread of this rank starts or ends writing a checkpoint. Any thread may call it."""
        self._heartbeats.set_saving(self._rank, saving)


class Watchdog:
    """Detector of a run in which no rank makes progress for `timeout_s` seconds.

    0 disables it. Time in `exempt_phase` does not count."""

    def __init__(self, heartbeats: Heartbeats, timeout_s: float, exempt_phase: Phase = Phase.SETUP) -> None:
        self._heartbeats, self.timeout_s, self._exempt_phase = heartbeats, timeout_s, exempt_phase
        self._last_seen: list[Heartbeat] = []
        self._last_change = time.monotonic()

    def expired(self) -> list[Heartbeat] | None:
        """Return the heartbeats of all ranks if the timeout has passed, else None."""
        heartbeats, now = self._heartbeats.read(), time.monotonic()
        if heartbeats != self._last_seen or any(heartbeat.phase is self._exempt_phase for heartbeat in heartbeats):
            self._last_seen, self._last_change = heartbeats, now
        return heartbeats if 0 < self.timeout_s < now - self._last_change else None


def collective_timeout_s(timeout_s: float, watchdog_s: float) -> float:
    """Return the timeout of the process group for `device.timeout` and `run.watchdog`.

    It outlasts the watchdog: a collective that times out ends the ranks that wait, and only the watchdog sees which
    rank they wait for.
    """
    if watchdog_s == 0:
        return timeout_s
    return max(timeout_s, min(watchdog_s + COLLECTIVE_TIMEOUT_MARGIN_SECONDS, MAX_COLLECTIVE_TIMEOUT_SECONDS))


def lagging_ranks(heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """Return the ranks with the least progress, which the other ranks wait for."""
    least_progress = min((heartbeat.step, heartbeat.phase_count) for heartbeat in heartbeats.values())
    return [rank for rank, heartbeat in heartbeats.items() if (heartbeat.step, heartbeat.phase_count) == least_progress]


def describe_stall(problem: str, late: Sequence[int], num_ranks: int, *details: str) -> str:
    """Return the cause of a stall in one sentence: the problem, the `late` ranks if others wait for them, and details
    whose subject is the first of them."""
    waiting = []
    if len(late) < num_ranks:
        noun = "rank" if len(late) == 1 else "ranks"
        waiting = [f"the other ranks wait for {noun} {', '.join(map(str, late))}"]
    return "; ".join([problem, *waiting, *details])


def describe_progress(heartbeat: Heartbeat) -> str:
    """Describe the progress of a rank in a clause whose subject is this rank."""
    return f"this rank completed {heartbeat.step} steps and is {heartbeat.phase.label}"
