"""Playback of GPU recordings: files with one JSON snapshot per line, as `gputrain gpus --record` writes them.

`monitor` uses it for GPUTRAIN_NVML=replay:FILE, `tui.screens.demo` for the demo.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.base.codec import InvalidRecordError, Record, decode, replace
from engine.base.errors import UsageError, file_errors
from engine.gpus.snapshot import Snapshot

MIN_INTERVAL_SECONDS = 0.05


def read_recording(path: Path) -> list[Snapshot]:
    """Read all snapshots of a recording. Raises UsageError if the file cannot be read or is not a recording."""
    with file_errors(str(path), "cannot be read"):
        lines = path.read_bytes().splitlines()
    snapshots = []
    for number, line in enumerate(lines, 1):
        try:
            snapshot = decode(line, Snapshot)
            snapshots.append(replace(snapshot, source=replace(snapshot.source, kind="recording")))
        except InvalidRecordError as error:
            # A partial last line is left when the recorder was killed.
            if number == len(lines) and snapshots:
                break
            raise UsageError.one(
                str(path), f"is not a GPU recording: line {number} {error}", code="wrong-format"
            ) from error
    if not snapshots:
        raise UsageError.one(str(path), "is not a GPU recording: the file is empty", code="wrong-format")
    return snapshots


class RecordingMonitor:
    """Plays a recording in a loop at its original pace, with its times shifted to now."""

    def __init__(self, path: Path, stale_after_s: float) -> None:
        """Raises UsageError if `path` is not a recording."""
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
        shifted: Snapshot = shift_times(snapshot, shift)
        return shifted.as_of(time.time(), self._stale_after_s)

    def set_period(self, period_s: float) -> None:
        """Do nothing: a recording keeps its pace."""

    def close(self) -> None:
        """Do nothing: a recording holds no resources."""


def shift_times(value: Any, offset_s: float) -> Any:
    """Return a copy of a snapshot, or of a part of one, with `offset_s` added to every time."""
    if isinstance(value, tuple):
        return tuple(shift_times(element, offset_s) for element in value)
    if not isinstance(value, Record):
        return value
    changed = {name: shift_times(getattr(value, name), offset_s) for name in value.__struct_fields__}
    if changed.get("time") is not None:
        changed["time"] = round(changed["time"] + offset_s, 3)
    return replace(value, **changed)
