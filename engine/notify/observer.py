"""Find the occasions of one session of a run: follow its journal and the clock, in the process that owns the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
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
from engine.utils.files import file_size

if TYPE_CHECKING:
    from engine.config.notify_section import Occasion

# A run stalls if it takes this many times as long as its longest step, evaluation or checkpoint so far.
STALL_RATIO = 3.0
# Occasions by the codes of what the supervisor of a command warns of: it sees what does not reach the journal, such as
# a progress bar.
COMMAND_OCCASIONS: dict[str, Occasion] = {"stalled": "stalled", "non-finite": "nan", "process-failed": "restarted"}
# A poll that comes this late means that this process or the host was suspended.
SUSPENDED_SECONDS = 60.0


class SessionObserver:
    """Finds the occasions of the session that starts when it is made. `ended` is true after the last one."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        granted: Sequence[str] = (),
        waited_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the GPUs that the run has waited for, and for how long."""
        self.folder, self.config, self._clock = folder, config, clock
        self.ended = False
        self._granted = granted if waited_s > 0 else ()
        self._waited_s = waited_s
        self._history = History()
        """State of the session, without earlier ones."""
        self._journal = JournalReader(folder.journal)
        self._journal.offset = file_size(folder.journal)
        self._started = self._slowed = False
        self._failure: RankFailed | None = None
        self._last_poll = clock()
        self._progress: tuple[object, ...] = ()
        """Where the run stands; it made progress when this has changed, at `_progress_at`."""
        self._progress_at = self._longest_s = 0.0
        self._stalled = False

    def poll(self) -> list[Message]:
        """Return the messages that are due, without those of occasions that the user did not select."""
        messages = [message for message in self._poll() if message.occasion in self.config.notify.when]
        self._last_poll = self._clock()
        return messages

    def _poll(self) -> Iterator[Message]:
        if self._granted:
            yield self._message("granted", granted_sentence(self._granted, self._waited_s))
            self._granted = ()
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
            self._started, self._failure, self._progress, self._longest_s = True, None, (), 0.0
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
        history, now, stall_minutes = self._history, self._clock(), self.config.notify.stall_minutes
        if history.command is not None or stall_minutes == 0:
            return
        place = (history.steps_done, history.current_epoch, history.phase, len(history.epochs))
        is_late = now - self._last_poll > SUSPENDED_SECONDS
        if place != self._progress or is_late or history.paused or not self._started or history.failures:
            if self._progress and not (is_late or history.paused):
                self._longest_s = max(self._longest_s, now - self._progress_at)
            self._progress, self._progress_at, self._stalled = place, now, False
        elif now - self._progress_at >= max(60 * stall_minutes, STALL_RATIO * self._longest_s) and not self._stalled:
            self._stalled = True
            record = self._record()
            sentence = stall_sentence(record, now - self._progress_at, self.config.run.watchdog)
            yield self._message("stalled", sentence, record)

    def _poll_throttling(self) -> Iterator[Message]:
        history = self._history
        if not self._started or self._slowed:
            return
        bottleneck = heat_bottleneck(history.started, history.throttling, time.time())
        if bottleneck is None and history.bottleneck is not None:
            # Power limits a busy GPU often. It counts if it is what limits the run.
            bottleneck = history.bottleneck if history.bottleneck.kind is BottleneckKind.THROTTLED else None
        if bottleneck is not None:
            self._slowed = True
            yield self._message("slowed", bottleneck.message)

    def _record(self) -> RunRecord:
        return read_run_record(self.folder) or NO_RECORD

    def _message(self, occasion: Occasion, sentence: str, record: RunRecord | None = None) -> Message:
        # The folder may have been moved since.
        path, host = self.folder.path, socket.gethostname()
        return make_message(occasion, sentence, host, path, record or self._record(), resumable=self.folder.resumable)
