"""A command that shows no sign of life: no output, no metric, no work on its GPUs.

`engine.launch.program_run` polls `StallWatch` and records its warning, of which `engine.notify` sends a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.utils.errors import Problem
from engine.utils.units import format_duration

# A stall is longer than this many times the longest silence so far: a service is silent between requests.
STALL_RATIO = 3.0


@dataclass
class StallWatch:
    """Detects stalls of a command, and reports each one once."""

    limit_s: float
    """Seconds without a sign of life; 0 disables."""
    clock: Callable[[], float] = time.monotonic
    _signs: tuple[object, ...] = ()
    _since: float = 0.0
    _longest_s: float = 0.0
    _is_told: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    def poll(self, *signs: object) -> Problem | None:
        """Return a warning once the command has shown none of the signs for too long; else None.

        `signs` are values that change when the command does something."""
        silent_s = self.clock() - self._since
        if signs != self._signs:
            self._longest_s = max(self._longest_s, silent_s)
            self._signs, self._since, self._is_told = signs, self.clock(), False
            return None
        if not self.limit_s or self._is_told or silent_s < max(self.limit_s, STALL_RATIO * self._longest_s):
            return None
        self._is_told = True
        reason = f"no output, no metric and no work on its GPUs for {format_duration(silent_s)}"
        return Problem("", reason, code="stalled")
