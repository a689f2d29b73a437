"""Where each rank is, in memory that the owner of the run reads without asking: how a rank that makes no step is found,
and which one it is."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

_SLOT = struct.Struct("qqq")


class Phase(IntEnum):
    """What a rank does. All ranks come through the same places in the same order."""

    SETUP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    EVALUATION = 4
    REDUCE_METRICS = 5
    CHECKPOINT = 6
    PAUSED = 7

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Phase.SETUP: "setting up",
    Phase.DATA: "waiting for data",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.EVALUATION: "in the evaluation",
    Phase.REDUCE_METRICS: "adding up over the ranks",
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.PAUSED: "paused",
}


@dataclass(frozen=True)
class Heartbeat:
    """A rank has done `step` steps, and has entered `phase_count` phases since."""

    step: int = 0
    phase_count: int = 0
    phase: Phase = Phase.SETUP


class Heartbeats:
    """One heartbeat per rank, in anonymous shared memory that ends with the last process that maps it. `fd` is received
    from the process that created it."""

    def __init__(self, num_ranks: int, fd: int | None = None) -> None:
        self._num_ranks = num_ranks
        self.fd = os.memfd_create("gputrain-beats") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, num_ranks * _SLOT.size)
        self._memory = mmap.mmap(self.fd, num_ranks * _SLOT.size)

    def write(self, rank: int, step: int, phase_count: int, phase: Phase) -> None:
        _SLOT.pack_into(self._memory, rank * _SLOT.size, step, phase_count, phase)

    def read(self) -> list[Heartbeat]:
        slots = (_SLOT.unpack_from(self._memory, rank * _SLOT.size) for rank in range(self._num_ranks))
        return [Heartbeat(step, count, Phase(phase)) for step, count, phase in slots]

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class HeartbeatWriter:
    """Writes the heartbeat of one rank."""

    def __init__(self, heartbeats: Heartbeats, rank: int) -> None:
        self._heartbeats, self._rank = heartbeats, rank
        self._step = self._phase_count = 0

    def enter_phase(self, step: int, phase: Phase) -> None:
        self._phase_count = self._phase_count + 1 if step == self._step else 0
        self._step = step
        self._heartbeats.write(self._rank, step, self._phase_count, phase)


class Watchdog:
    """Knows for how long no rank has moved. `timeout_s` is in seconds, 0 for none. Time in `exempt_phase` does not
    count."""

    def __init__(self, heartbeats: Heartbeats, timeout_s: float, exempt_phase: Phase = Phase.SETUP) -> None:
        self._heartbeats, self.timeout_s, self._exempt_phase = heartbeats, timeout_s, exempt_phase
        self._last_seen: list[Heartbeat] = []
        self._last_change = time.monotonic()

    def expired(self) -> list[Heartbeat] | None:
        """Where the ranks stand once the limit has passed."""
        heartbeats, now = self._heartbeats.read(), time.monotonic()
        if heartbeats != self._last_seen or any(beat.phase is self._exempt_phase for beat in heartbeats):
            self._last_seen, self._last_change = heartbeats, now
        return heartbeats if 0 < self.timeout_s < now - self._last_change else None


def lagging_ranks(heartbeats: Mapping[int, Heartbeat]) -> list[int]:
    """The ranks that the others wait for: who has come the least far."""
    least = min((beat.step, beat.phase_count) for beat in heartbeats.values())
    return [rank for rank, beat in heartbeats.items() if (beat.step, beat.phase_count) == least]


def describe_progress(heartbeat: Heartbeat) -> str:
    return f"it has done {heartbeat.step} steps and is {heartbeat.phase.label}"
