"""Position and throughput of the current epoch of a run whose events arrive."""

from __future__ import annotations

import math

from engine.runs.event_lines import TrainingProgress
from engine.runs.events import Event, PhaseChanged, RunContinued, RunResumed, StepEvent
from engine.runs.history import History
from engine.utils.units import format_rate, format_score


class EpochProgress:
    """Position and throughput of the current epoch. `history` already includes each event that is added."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._start_time, self._start_step = math.inf, 0
        self.steps = 0
        """Number of completed steps of the epoch."""
        self.step_seconds: float | None = None
        """Mean time of a step since the start of the epoch, the resume or the last pause; None before the first."""

    def add(self, event: Event) -> None:
        if not isinstance(event, PhaseChanged | RunContinued | StepEvent | TrainingProgress):
            return
        steps = event.step - self._first_step()
        # Losses arrive a step later, on a GPU several.
        self.steps = max(self.steps, steps) if isinstance(event, StepEvent) else steps
        if isinstance(event, RunContinued) or (isinstance(event, PhaseChanged) and event.phase == "training"):
            self._start_time, self._start_step, self.step_seconds = event.time, event.step, None
        elif event.step > self._start_step and isinstance(event, TrainingProgress):
            self.step_seconds = max(event.time - self._start_time, 0.0) / (event.step - self._start_step)

    @property
    def number(self) -> int:
        """The current epoch, from 1."""
        return max(self._history.current_epoch, 1)

    def _first_step(self) -> int:
        """Return the number of steps before the current epoch."""
        started = self._history.started
        if self._history.epochs:
            return self._history.epochs[-1].step
        if isinstance(started, RunResumed):
            # The events begin with the resume, which may be within an epoch.
            return started.from_step // started.steps_per_epoch * started.steps_per_epoch
        return 0

    def describe(self) -> str:
        """Return throughput and loss as far as they are known."""
        latest, started = self._history.latest_step, self._history.started
        rate, loss = None, ""
        if started is not None and self.step_seconds:
            rate = started.global_batch / self.step_seconds
        if latest is not None and latest.epoch == self.number:
            rate = latest.images_per_second
            # The journal stores a loss that is NaN or infinite as null.
            loss = f"  loss {format_score(math.nan if latest.losses[-1] is None else latest.losses[-1])}"
        if rate is None:
            return ""
        return f"{format_rate(rate)} images/s{loss}"
