"""Find the occasions of one session of a run: follow its journal, its owner and the clock.

`watcher` polls an observer once a second. It sees only what any reader of the run folder sees.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.distributed.failures import describe_failure
from engine.notify.message import Message, granted_sentence, make_message, stall_sentence
from engine.runs.bottleneck import BottleneckKind, heat_bottleneck
from engine.runs.claim import read_claim
from engine.runs.command_events import CommandStarted
from engine.runs.events import RankFailed, RunFinished, RunStarted, WarningEvent
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.record_completion import open_run
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record
from engine.runs.run_row import state_message
from engine.utils.codec import Count, FileNumber, Finite, Record
from engine.utils.files import shown_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from engine.config.notify_section import Occasion

# A run without an owner and without an end may still be deleted, because it never began.
CRASH_GRACE_SECONDS = 2.0
CRASHED_WITHOUT_CHECKPOINT = "supervisor exited unexpectedly; there is no checkpoint to resume from"
# torchrun restarts the ranks of a run, whose rank 0 then owns it again.
RESTART_GRACE_SECONDS = 60.0
# A run stalls if it takes this many times as long as its longest step, evaluation or checkpoint so far.
STALL_RATIO = 3.0
SLOWED_REPEAT_SECONDS = 6 * 3600.0
# Occasions by the codes of what the supervisor of a command warns of: it sees what does not reach the journal, such as
# a progress bar.
COMMAND_OCCASIONS: dict[str, Occasion] = {"stalled": "stalled", "non-finite": "nan", "process-failed": "restarted"}
# A poll that comes this late means that this process or the host was suspended.
SUSPENDED_SECONDS = 60.0


class WatchOptions(Record, frozen=True, kw_only=True):
    """What the owner of the run passes to the watcher of one session, as JSON."""

    folder: str
    """Path of the run folder when the session starts."""
    inode: FileNumber
    """Inode number of the folder: another folder may take its place."""
    owner_pid: Count
    journal_start: Count
    """Size of the journal when the session starts, in bytes: earlier events belong to earlier sessions. Their times say
    nothing if the clock of the host was set since."""
    urls: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    min_minutes: Finite = 0.0
    stall_minutes: Finite = 0.0
    watchdog_s: Finite = 0.0
    crash_grace_s: Finite = CRASH_GRACE_SECONDS
    waited_s: Finite = 0.0
    """Seconds that the run waited for its GPUs; 0 if it did not."""
    gpus: tuple[str, ...] = ()
    retry_delays_s: tuple[Finite, ...] = ()


@dataclass
class _Progress:
    """When the run last made progress, on the monotonic clock, and the longest time without it so far."""

    marker: tuple[object, ...] = ()
    since: float = 0.0
    longest_s: float = 0.0
    told: bool = False


@dataclass
class SessionObserver:
    """Finds the occasions of one session. `ended` is true after the last one, or when another session has begun."""

    folder: RunFolder
    options: WatchOptions
    clock: Callable[[], float] = time.monotonic
    ended: bool = False
    _started: bool = False
    _finished: RunFinished | None = None
    _failure: RankFailed | None = None
    _unowned_since: float | None = None
    _slowed_at: float | None = None
    _granted_told: bool = False
    _last_poll: float | None = None
    _progress: _Progress = field(default_factory=_Progress)

    def __post_init__(self) -> None:
        self._history = History()
        """State of the session, without earlier ones."""
        self._journal = JournalReader(self.folder.journal)
        self._journal.offset = self.options.journal_start
        self._host = socket.gethostname()

    def poll(self) -> list[Message]:
        """Return the messages that are due, without those of occasions that the user did not select."""
        messages = [message for message in self._poll() if message.occasion in self.options.on]
        self._last_poll = self.clock()
        return messages

    def _poll(self) -> Iterator[Message]:
        # Before the journal: an owner writes the end of the run before it releases the folder.
        owned = self._is_owned()
        if self.folder.is_deleted:
            self.ended = True
            if self._started:
                yield self._message("failed", "the run folder was deleted, so the run has ended", NO_RECORD)
            return
        if not self._granted_told and self.options.waited_s > 0:
            self._granted_told = True
            yield self._message("granted", granted_sentence(self.options.gpus, self.options.waited_s))
        yield from self._follow_session()
        if self._finished is not None:
            yield from self._end(self._finished, owned)
        elif owned is None:
            # Another process resumed the run, and has a watcher of its own.
            self.ended = True
        elif not owned:
            yield from self._poll_crash()
        else:
            self._unowned_since = None
            yield from self._poll_stall()
            yield from self._poll_throttling()

    def _is_owned(self) -> bool | None:
        """Whether the owner of this session lives; None if another process owns the run."""
        if not self.folder.is_owned():
            return False
        claim = read_claim(self.folder.owner)
        return True if claim is None or claim.pid in (None, self.options.owner_pid) else None

    def _follow_session(self) -> Iterator[Message]:
        """Find a start of the ranks after a failure in this session (`run.max_restarts`), and its end."""
        for event in self._journal.poll():
            self._history.add(event)
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
                self._finished = event

    def _end(self, finished: RunFinished, owned: bool | None) -> Iterator[Message]:
        # The record of a run that another process has resumed is that of the new session.
        record = read_run_record(self.folder) if owned is not None else self._history.record()
        if owned and (record is None or record.state.live):
            # The owner writes it next, or cannot and leaves it behind.
            return
        self.ended = True
        if record is None or owned is False:
            record = open_run(self.folder).record
        if finished.state == "failed":
            sentence = finished.message if self._failure is None else describe_failure(self._failure)
            yield self._message("failed", sentence, record)
        elif record.seconds >= 60 * self.options.min_minutes:
            occasion: Occasion = "finished" if finished.state == "finished" else "stopped"
            yield self._message(occasion, finished.message, record)

    def _poll_crash(self) -> Iterator[Message]:
        now = self.clock()
        self._unowned_since = now if self._unowned_since is None else self._unowned_since
        if now - self._unowned_since >= self.options.crash_grace_s:
            self.ended = True
            record = open_run(self.folder).record
            is_resumable = self.folder.resumable
            sentence = state_message(record, RunState.CRASHED) if is_resumable else CRASHED_WITHOUT_CHECKPOINT
            yield self._message("crashed", sentence, record)

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
        limit_s = max(60 * self.options.stall_minutes, STALL_RATIO * progress.longest_s)
        if self.options.stall_minutes > 0 and now - progress.since >= limit_s and not progress.told:
            progress.told = True
            record = self._record()
            sentence = stall_sentence(record, now - progress.since, self.options.watchdog_s)
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
        path = shown_path(self.folder.root)
        record = record or self._record()
        return make_message(occasion, sentence, self._host, path, record, resumable=self.folder.resumable)
