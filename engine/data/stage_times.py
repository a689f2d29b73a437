"""Time per stage of the input pipeline, measured only while somebody asks for it.

The code that loads images marks its stages with `stage`. `LoaderCounters` carries their times from the loader processes
to the rank, whose `DeviceLoader` reports them as `StageTimes` to `gputrain runs profile`.
"""

from __future__ import annotations

import mmap
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

STAGES = ("read", "decode", "crop", "augment", "collate", "copy")
_IMAGES, _BATCHES = len(STAGES), len(STAGES) + 1
_ROW_LENGTH = len(STAGES) + 2
_DOUBLE_BYTES = 8
_OFF: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class StageTimes:
    """Seconds per stage of `STAGES`, summed over all threads and processes of a rank, for `images` loaded images.

    `queue_depth` is the mean number of batches that were ready when the rank received one. "copy" is the transfer to
    the device together with what runs there: augmentation of the batch, and normalization.
    """

    seconds: dict[str, float]
    images: int
    queue_depth: float


class LoaderCounters:
    """Counters of the processes that load the images of a rank: its loader processes and, in the last row, the rank.

    They live in anonymous memory that forked processes share. Each process writes only to its own row of float64: the
    seconds of each stage, and the images and the batches that it has loaded.
    """

    def __init__(self, processes: int) -> None:
        self._memory = mmap.mmap(-1, _DOUBLE_BYTES * (1 + (processes + 1) * _ROW_LENGTH))
        # The first number says whether stages are timed.
        self._numbers = memoryview(self._memory).cast("d")
        self.processes, self.process = processes, 0
        self._lock = threading.Lock()
        self._at_start = [0.0] * _ROW_LENGTH
        self._depth_sum, self._depth_count, self._received = 0, 0, 0

    def attach(self, process: int | None = None) -> None:
        """Count what this process loads: loader process number `process`, or the rank."""
        global _counters
        self.process = self.processes if process is None else process
        self._lock = threading.Lock()
        _counters = self

    @property
    def are_timing(self) -> bool:
        return self._numbers[0] > 0

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to the time of a stage in this process."""
        self._add(STAGES.index(name), seconds)

    def add_batch(self, images: int) -> None:
        """Count a batch that this process has loaded."""
        self._add(_IMAGES, images)
        self._add(_BATCHES, 1)

    def _add(self, column: int, amount: float) -> None:
        with self._lock:
            self._numbers[1 + self.process * _ROW_LENGTH + column] += amount

    def _sums(self) -> list[float]:
        numbers = self._numbers[1:].tolist()
        return [sum(numbers[column::_ROW_LENGTH]) for column in range(_ROW_LENGTH)]

    def receive_batch(self) -> None:
        """Count a batch that the rank is about to receive, and how many loaded batches wait for the rank."""
        if self.are_timing:
            self._depth_sum += max(int(self._sums()[_BATCHES]) - self._received, 0)
            self._depth_count += 1
        self._received += 1

    def start(self) -> None:
        """Start to time the stages in all processes."""
        self._at_start = self._sums()
        self._depth_sum = self._depth_count = 0
        self._numbers[0] = 1

    def stop(self) -> StageTimes:
        """Stop timing, and return the times since `start`."""
        self._numbers[0] = 0
        passed = [now - before for now, before in zip(self._sums(), self._at_start, strict=True)]
        seconds = dict(zip(STAGES, passed, strict=False))
        return StageTimes(seconds, int(passed[_IMAGES]), self._depth_sum / max(self._depth_count, 1))


# Those of this process.
_counters: LoaderCounters | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """Time the code in this context as a stage, if the stages of this process are timed at present."""
    if _counters is None or not _counters.are_timing:
        return _OFF
    return _Timing(_counters, name)


class _Timing(AbstractContextManager[None]):
    """Adds the duration of its context to a stage."""

    def __init__(self, counters: LoaderCounters, name: str) -> None:
        self._counters, self._name, self._start = counters, name, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._counters.add_seconds(self._name, time.perf_counter() - self._start)
