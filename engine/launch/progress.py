"""What the terminal of a run shows besides its journal events: the progress of the ranks, and the events of a rank
without a journal. The drivers, `launcher` and `external`, call it."""

from __future__ import annotations

import sys
import time

from engine.distributed.watchdog import Heartbeats
from engine.runs.event_lines import TrainingProgress, event_line
from engine.runs.events import Event
from engine.runs.recorder import Listener

MIN_INTERVAL_SECONDS = 0.25


class ProgressReporter:
    """Emits `TrainingProgress` to a listener after a step that all ranks of these heartbeats have completed."""

    def __init__(self, listener: Listener, min_interval_s: float = MIN_INTERVAL_SECONDS) -> None:
        self._listener, self._min_interval_s = listener, min_interval_s
        self._step, self._next_time = 0, 0.0

    def poll(self, heartbeats: Heartbeats) -> None:
        step, now = min(heartbeat.step for heartbeat in heartbeats.read()), time.monotonic()
        if step != self._step and now >= self._next_time:
            self._step, self._next_time = step, now + self._min_interval_s
            self._listener(TrainingProgress(step=step))


def stderr_listener(rank: int) -> Listener:
    """Return the listener of a rank without a journal: its events go to the launcher's log."""

    def print_line(event: Event) -> None:
        if (line := event_line(event)) is not None:
            print(f"rank {rank}: {line}", file=sys.stderr)

    return print_line
