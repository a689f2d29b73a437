"""What happened during a run, epoch by epoch and session by session, from the events of its journal.

`engine.report.runs` adds the events; the page shows the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from engine.runs.bottleneck import Bottleneck, valid_share
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    RankFailed,
    RunFinished,
    RunResumed,
    RunStarted,
    WarningEvent,
)
from engine.runs.history import History

MAX_MESSAGES = 1000
"""Different messages that are kept; a damaged journal may have any number."""


RESTARTED = "ranks restarted after a failure"


@dataclass
class Session:
    """One session of a run: how it began, when it ended (Unix seconds of its last event), and how."""

    started: RunStarted
    end: float
    state: str = ""
    """State of `run_finished`, `RESTARTED` after a failure without that event, "" without either."""
    message: str = ""

    @property
    def from_step(self) -> int:
        return self.started.from_step if isinstance(self.started, RunResumed) else 0

    @property
    def seconds(self) -> float:
        return max(self.end - self.started.time, 0.0)


@dataclass(frozen=True)
class EpochTime:
    """How long one epoch took, in seconds, and what limited it. A share of the time is NaN if it is unknown.

    `waited`, `forward` and `rest` are means over the ranks; `rest` is backward passes, communication and optimizer.
    `evaluation` is the remaining time of the epoch. Without timings of the ranks, only `waited` is known, and `other`
    is all the rest.
    """

    epoch: int
    step: int
    seconds: float
    waited: float
    forward: float
    rest: float
    evaluation: float
    other: float
    bottleneck: Bottleneck | None


@dataclass
class Message:
    """A warning, a failure or a request: when it came first, and how often."""

    time: float
    kind: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class LimitedStretch:
    """Consecutive epochs with the same bottleneck: the first and the last one, their duration, and the last message."""

    first: int
    last: int
    seconds: float
    bottleneck: Bottleneck | None


@dataclass
class Timeline:
    """Collects sessions, times of epochs and messages; `add` takes each event after the history of the run has it."""

    sessions: list[Session] = field(default_factory=list)
    epochs: list[EpochTime] = field(default_factory=list)
    messages: dict[tuple[str, str], Message] = field(default_factory=dict)
    checkpoints: int = 0

    def add(self, event: Event, history: History) -> None:
        """Add one event. `history` is the state of the run after it."""
        match event:
            case RunStarted():
                if isinstance(event, RunResumed):
                    self.epochs = [epoch for epoch in self.epochs if epoch.step <= event.from_step]
                else:
                    self.epochs.clear()
                self.sessions.append(Session(event, event.time))
            case EpochEvent():
                self.epochs.append(epoch_time(event, history.bottleneck))
            case CheckpointSaved():
                self.checkpoints += 1
            case WarningEvent():
                self._add_message(event.time, "warning", event.message)
            case RankFailed():
                self._add_message(event.time, "failure", f"rank {event.rank}: {event.cause}")
                if self.sessions and not self.sessions[-1].state:
                    # The supervisor restarts the ranks, or a `run_finished` event follows.
                    self.sessions[-1].state, self.sessions[-1].message = RESTARTED, event.cause
            case ControlEvent():
                self._add_message(event.time, "request", f"{event.request} by {event.by}: {event.outcome}")
        if self.sessions:
            session = self.sessions[-1]
            # Events of the ranks are recorded up to seconds after later ones of the supervisor.
            session.end = max(session.end, event.time)
            if isinstance(event, RunFinished):
                session.state, session.message = event.state, event.message

    def _add_message(self, time: float, kind: str, text: str) -> None:
        known = self.messages.get((kind, text))
        if known is not None:
            known.count += 1
        elif len(self.messages) < MAX_MESSAGES:
            self.messages[kind, text] = Message(time, kind, text)

    def stretches(self) -> list[LimitedStretch]:
        """Return the epochs, with consecutive ones of the same kind of bottleneck joined."""
        stretches = [list(epochs) for _, epochs in groupby(self.epochs, lambda epoch: _kind(epoch.bottleneck))]
        return [
            LimitedStretch(
                epochs[0].epoch, epochs[-1].epoch, sum(epoch.seconds for epoch in epochs), epochs[-1].bottleneck
            )
            for epochs in stretches
        ]


def _kind(bottleneck: Bottleneck | None) -> str:
    return "" if bottleneck is None else str(bottleneck.kind)


def epoch_time(event: EpochEvent, bottleneck: Bottleneck | None) -> EpochTime:
    """Return how the time of an epoch was spent, as far as the journal tells."""
    seconds, timings = event.seconds, event.rank_timings
    if timings:
        training = statistics.fmean(timing.seconds for timing in timings)
        waited = statistics.fmean(timing.data_wait_seconds for timing in timings)
        forward = statistics.fmean(timing.forward_seconds for timing in timings)
        rest, evaluation = max(training - waited - forward, 0.0), max(seconds - training, 0.0)
        other = math.nan
    else:
        share = valid_share(event.data_wait)
        waited = math.nan if share is None else share * seconds
        forward = rest = evaluation = math.nan
        other = seconds - (0.0 if math.isnan(waited) else waited)
    return EpochTime(event.epoch, event.step, seconds, waited, forward, rest, evaluation, other, bottleneck)


def limit_shares(epochs: Sequence[EpochTime]) -> dict[str, float]:
    """Return the share of the time of all epochs by kind of bottleneck, the largest first; "" is an unknown one."""
    totals: dict[str, float] = {}
    for epoch in epochs:
        kind = _kind(epoch.bottleneck)
        totals[kind] = totals.get(kind, 0.0) + epoch.seconds
    total = sum(totals.values()) or 1.0
    return {kind: totals[kind] / total for kind in sorted(totals, key=totals.__getitem__, reverse=True)}
