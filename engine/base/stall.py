"""Notice that something makes no progress for too long: a training (`jobs.notify`) or a command (`jobs.launch`)."""

from __future__ import annotations

import time
from collections.abc import Callable

# A stall is longer than this many times the longest silence so far, such as a step, an evaluation or a checkpoint.
STALL_RATIO = 3.0


class StallWatch:
    """Reports each stall of more than `limit_s` seconds once; 0 disables it."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._longest_s = 0.0
        self.restart()

    def restart(self, *signs: object) -> None:
        """Begin anew with these signs of life: the silence until now does not count."""
        self._signs, self._since, self._is_reported = signs, self._clock(), False

    def poll(self, *signs: object) -> float | None:
        """Return for how many seconds the signs have not changed once that is too long; else None."""
        silent_s = self._clock() - self._since
        if signs != self._signs:
            self._longest_s = max(self._longest_s, silent_s)
            self.restart(*signs)
            return None
        if not self._limit_s or self._is_reported or silent_s < max(self._limit_s, STALL_RATIO * self._longest_s):
            return None
        self._is_reported = True
        return silent_s
