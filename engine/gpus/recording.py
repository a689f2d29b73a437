"""Recordings: snapshots, one JSON line each, written as they come and played back as if they came now."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.gpus.snapshot import Snapshot, SnapshotSource
from engine.utils.errors import UsageError

MIN_INTERVAL_SECONDS = 0.05


def read_recording(path: Path) -> list[Snapshot]:
    """Raises UsageError where there is none, or it is not one."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror}") from error
    snapshots = []
    for number, line in enumerate(lines, 1):
        try:
            snapshot = Snapshot.from_line(line)
            snapshots.append(replace(snapshot, source=SnapshotSource("recording", snapshot.source.made_up)))
        except ValueError as error:
            # What was being written when the recorder was killed.
            if number == len(lines) and snapshots:
                break
            raise UsageError.one(str(path), f"is no recording of GPUs: line {number}: {error}") from error
    if not snapshots:
        raise UsageError.one(str(path), "is no recording of GPUs: it is empty")
    return snapshots


class RecordingMonitor:
    """Plays a recording at the pace at which it was made, over and over, with its times moved to now."""

    def __init__(self, path: Path, stale_after_s: float) -> None:
        """Raises UsageError."""
        self._snapshots, self._stale_after_s = read_recording(path), stale_after_s
        gaps = [max(after.time - before.time, MIN_INTERVAL_SECONDS) for before, after in pairwise(self._snapshots)]
        self._intervals_s = [*gaps, gaps[-1] if gaps else 1.0]
        self._position = -1
        self._next_at = time.monotonic()

    def read(self, timeout_s: float) -> Snapshot | None:
        wait = self._next_at - time.monotonic()
        if wait > timeout_s:
            time.sleep(timeout_s)
            return None
        time.sleep(max(wait, 0.0))
        self._position = (self._position + 1) % len(self._snapshots)
        self._next_at = max(self._next_at + self._intervals_s[self._position], time.monotonic())
        return self.latest()

    def latest(self) -> Snapshot | None:
        if self._position < 0:
            return None
        snapshot = self._snapshots[self._position]
        shift = self._next_at - self._intervals_s[self._position] + time.time() - time.monotonic() - snapshot.time
        return Snapshot.from_dict(shift_times(snapshot.to_dict(), shift)).as_of(time.time(), self._stale_after_s)

    def close(self) -> None:
        """There is nothing to close."""


def shift_times(values: Any, offset_s: float) -> Any:
    """The same JSON with every `time` so much later."""
    if isinstance(values, list):
        return [shift_times(value, offset_s) for value in values]
    if not isinstance(values, dict):
        return values
    return {
        key: value + offset_s if key == "time" and isinstance(value, int | float) else shift_times(value, offset_s)
        for key, value in values.items()
    }
