"""The number of decode threads of a rank, which follows its steps while it trains.

The rank reports each batch to `ThreadCount.observe`; `engine.data.pipelines.decode_threads` reads `value` in the loader
process. The number changes how fast batches are loaded, never what is in them.
"""

from __future__ import annotations

import mmap
from math import ceil

WINDOW_BATCHES = 16  # batches per decision
MAX_WAIT_SHARE = 0.01  # share of a window that the rank may wait for batches without more threads
MAX_BUSY_SHARE = 0.8  # share of a window that the threads may work for one thread less
CALM_WINDOWS = 8  # consecutive windows in which one thread less had sufficed, before it ends


class ThreadCount:
    """A number of threads between 1 and `maximum`, in anonymous memory that forked processes share.

    Without `maximum` the number stays as it is.
    """

    def __init__(self, count: int, maximum: int | None = None) -> None:
        self._memory = mmap.mmap(-1, 8)
        self._shared = memoryview(self._memory).cast("q")
        self._shared[0] = count
        self._maximum = maximum
        self._patience = CALM_WINDOWS
        self._shrank_last = False
        self._calm_windows = 0
        self._start_window()

    @property
    def value(self) -> int:
        return self._shared[0]

    def share_of(self, process: int, processes: int) -> int:
        """Return how many of the threads one of several loader processes runs: at least one."""
        return max((self.value + processes - 1 - process) // processes, 1)

    def _start_window(self) -> None:
        self._batches, self._wait_seconds, self._seconds, self._busy_seconds = 0, 0.0, 0.0, 0.0

    def observe(self, wait_seconds: float, step_seconds: float, busy_seconds: float) -> None:
        """Take one batch of the rank into account: how long the rank waited for it, how long the step before it took,
        and how long the threads worked meanwhile, in sum."""
        if self._maximum is None:
            return
        self._batches += 1
        self._wait_seconds += wait_seconds
        self._seconds += wait_seconds + step_seconds
        self._busy_seconds += busy_seconds
        if self._batches < WINDOW_BATCHES:
            return
        wait_share = self._wait_seconds / max(self._seconds, 1e-9)
        if wait_share > MAX_WAIT_SHARE:
            self._grow(wait_share, self._maximum)
        elif self._busy_seconds < MAX_BUSY_SHARE * (self.value - 1) * self._seconds:
            self._shrink_after_patience()
        else:
            self._calm_windows = 0
        self._start_window()

    def _grow(self, wait_share: float, maximum: int) -> None:
        """Grow to the number of threads that would have had no wait, at most to twice the number."""
        needed = ceil(self.value / max(1 - wait_share, 0.5))
        self._calm_windows = 0
        if self._shrank_last:
            # The thread that ended is needed: wait longer before the next attempt.
            self._patience *= 2
            self._shrank_last = False
        self._shared[0] = min(max(needed, self.value + 1), maximum)

    def _shrink_after_patience(self) -> None:
        self._calm_windows += 1
        if self._calm_windows >= self._patience:
            self._shared[0] -= 1
            self._calm_windows, self._shrank_last = 0, True
