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


class Place(IntEnum):
    """What a rank does. All ranks come through the same places in the same order."""

    SETTING_UP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    EVALUATION = 4
    MEETING = 5
    SAVING = 6
    PAUSE = 7

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Place.SETTING_UP: "setting up",
    Place.DATA: "waiting for data",
    Place.FORWARD: "in the forward pass",
    Place.BACKWARD: "in the backward pass",
    Place.EVALUATION: "in the evaluation",
    Place.MEETING: "adding up over the ranks",
    Place.SAVING: "saving a checkpoint",
    Place.PAUSE: "paused",
}


@dataclass(frozen=True)
class Beat:
    """A rank has done `step` steps, and came since to its `count`-th place."""

    step: int = 0
    count: int = 0
    place: Place = Place.SETTING_UP


class Beats:
    """One beat a rank, in memory that has no name and goes with the last process that has it. `handle` is that of
    another process's, received from it."""

    def __init__(self, ranks: int, handle: int | None = None) -> None:
        self._ranks = ranks
        self.handle = os.memfd_create("gputrain-beats") if handle is None else handle
        if handle is None:
            os.ftruncate(self.handle, ranks * _SLOT.size)
        self._memory = mmap.mmap(self.handle, ranks * _SLOT.size)

    def mark(self, rank: int, step: int, count: int, place: Place) -> None:
        _SLOT.pack_into(self._memory, rank * _SLOT.size, step, count, place)

    def read(self) -> list[Beat]:
        slots = (_SLOT.unpack_from(self._memory, rank * _SLOT.size) for rank in range(self._ranks))
        return [Beat(step, count, Place(place)) for step, count, place in slots]

    def close(self) -> None:
        self._memory.close()
        os.close(self.handle)


class Marker:
    """A rank's own beat."""

    def __init__(self, beats: Beats, rank: int) -> None:
        self._beats, self._rank = beats, rank
        self._step = self._count = 0

    def at(self, step: int, place: Place) -> None:
        self._count = self._count + 1 if step == self._step else 0
        self._step = step
        self._beats.mark(self._rank, step, self._count, place)


class Watchdog:
    """Knows for how long no rank has moved. `limit` is in seconds, 0 for none. It does not count while a rank is at
    the place `except_at`."""

    def __init__(self, beats: Beats, limit: float, except_at: Place = Place.SETTING_UP) -> None:
        self._beats, self.limit, self._except_at = beats, limit, except_at
        self._seen: list[Beat] = []
        self._since = time.monotonic()

    def expired(self) -> list[Beat] | None:
        """Where the ranks stand once the limit has passed."""
        beats, now = self._beats.read(), time.monotonic()
        if beats != self._seen or any(beat.place is self._except_at for beat in beats):
            self._seen, self._since = beats, now
        return beats if 0 < self.limit < now - self._since else None


def behind(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that the others wait for: who has come the least far."""
    least = min((beat.step, beat.count) for beat in beats.values())
    return [rank for rank, beat in beats.items() if (beat.step, beat.count) == least]


def standing(beat: Beat) -> str:
    return f"it has done {beat.step} steps and is {beat.place.words}"
