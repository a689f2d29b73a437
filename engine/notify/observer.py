"""Find the occasions of one session of a run: follow its journal and the clock, in the process that owns the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.config.schema import Config
from engine.distributed.failures import describe_failure
from engine.notify.message import Message, granted_sentence, make_message, stall_sentence
from engine.runs.bottleneck import BottleneckKind, heat_bottleneck
from engine.runs.command_events import CommandStarted
from engine.runs.events import Event, RankFailed, RunFinished, RunStarted, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record
from engine.utils.files import file_size, shown_path

if TYPE_CHECKING:
    from engine.config.notify_section import Occasion

# A run stalls if it takes this many times as long as its longest step, evaluation or checkpoint so far.
STALL_RATIO = 3.0
SLOWED_REPEAT_SECONDS = 6 * 3600.0
# Occasions by the codes of what the supervisor of a command warns of: it sees what does not reach the journal, such as
# a progress bar.
COMMAND_OCCASIONS: dict[str, Occasion] = {"stalled": "stalled", "non-finite": "nan", "process-failed": "restarted"}
# A poll that comes this late means that this process or the host was suspended.
SUSPENDED_SECONDS = 60.0


@dataclass
class _Progress:
    """When the run last made progress, on the monotonic clock, and the longest time without it so far."""

    marker: tuple[object, ...] = ()
    since: float = 0.0
    longest_s: float = 0.0
    told: bool = False


@dataclass
class SessionObserver:
    """Finds the occasions of the session that starts when it is made. `ended` is true after the last one."""

    folder: RunFolder
    config: Config
    granted: Sequence[str] = ()
    """The GPUs that the run has waited for."""
    waited_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    ended: bool = False
    _started: bool = False
    _failure: RankFailed | None = None
    _slowed_at: float | None = None
    _last_poll: float | None = None
    _progress: _Progress = field(default_factory=_Progress)

    def __post_init__(self) -> None:
        self._history = History()
        """State of the session, without earlier ones."""
        self._journal = JournalReader(self.folder.journal)
        self._journal.offset = file_size(self.folder.journal)

    def poll(self) -> list[Message]:
        """Return the messages that are due, without those of occasions that the user did not select."""
        messages = [message for message in self._poll() if message.occasion in self.config.notify.when]
        self._last_poll = self.clock()
        return messages

    def _poll(self) -> Iterator[Message]:
        if self.granted and self.waited_s > 0:
            yield self._message("granted", granted_sentence(self.granted, self.waited_s))
            self.waited_s = 0.0
        for event in self._journal.poll():
            self._history.add(event)
            yield from self._follow(event)
        if not self.ended:
            yield from self._poll_stall()
            yield from self._poll_throttling()

    def _follow(self, event: Event) -> Iterator[Message]:
        """Find a start of the ranks after a failure in this session (`run.max_restarts`), and its end."""
        if isinstance(event, RunStarted | CommandStarted):
            if isinstance(event, RunStarted) and self._started and self._failure is not None:
                yield self._message("restarted", describe_failure(self._failure))
            self._started, self._failure, self._progress = True, None, _Progress()
        elif isinstance(event, RankFailed):
            self._failure = event
        elif isinstance(event, WarningEvent) and self._history.command is not None:
            if (occasion := COMMAND_OCCASIONS.get(event.code)) is not None:
                yield self._message(occasion, event.message)
        elif isinstance(event, RunFinished):
            self.ended = True
            record = self._history.record()
            if event.state == "failed":
                sentence = event.message if self._failure is None else describe_failure(self._failure)
                yield self._message("failed", sentence, record)
            elif record.seconds >= 60 * self.config.notify.min_minutes:
                yield self._message("finished" if event.state == "finished" else "stopped", event.message, record)

    def _poll_stall(self) -> Iterator[Message]:
        now, progress, history = self.clock(), self._progress, self._history
        is_late = self._last_poll is not None and now - self._last_poll > SUSPENDED_SECONDS
        if history.command is not None:
            return
        marker = (
            *(history.steps_done, history.current_epoch, history.phase, len(history.epochs), history.paused),
            history.latest_step.time if history.latest_step else None,
        )
        if marker != progress.marker or is_late or not self._started or history.paused or history.failures:
            waited = 0.0 if is_late or not progress.marker or history.paused else now - progress.since
            self._progress = _Progress(marker, now, max(progress.longest_s, waited))
            return
        stall_minutes = self.config.notify.stall_minutes
        limit_s = max(60 * stall_minutes, STALL_RATIO * progress.longest_s)
        if stall_minutes > 0 and now - progress.since >= limit_s and not progress.told:
            progress.told = True
            record = self._record()
            sentence = stall_sentence(record, now - progress.since, self.config.run.watchdog)
            yield self._message("stalled", sentence, record)

    def _poll_throttling(self) -> Iterator[Message]:
        now, history = self.clock(), self._history
        if not self._started or (self._slowed_at is not None and now - self._slowed_at < SLOWED_REPEAT_SECONDS):
            return
        bottleneck = heat_bottleneck(history.started, history.throttling, time.time())
        if bottleneck is None and history.bottleneck is not None:
            # Power limits a busy GPU often. It counts if it is what limits the run.
            bottleneck = history.bottleneck if history.bottleneck.kind is BottleneckKind.THROTTLED else None
        if bottleneck is not None:
            self._slowed_at = now
            yield self._message("slowed", bottleneck.message)

    def _record(self) -> RunRecord:
        return read_run_record(self.folder) or NO_RECORD

    def _message(self, occasion: Occasion, sentence: str, record: RunRecord | None = None) -> Message:
        # The folder may have been moved since.
        path, host = shown_path(self.folder.root), socket.gethostname()
        return make_message(occasion, sentence, host, path, record or self._record(), resumable=self.folder.resumable)
