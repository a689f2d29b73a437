"""Record a run: each event goes to the journal, and to the log, TensorBoard and the record, which it can do without.

The supervisor uses it; under torchrun and srun, rank 0 does.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from engine.base import codec
from engine.base.errors import Problem
from engine.base.files import replace_file
from engine.base.text import printable
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.event_lines import event_lines
from engine.runs.events import (
    EpochEvent,
    Event,
    FlushJournal,
    GpuEvent,
    RankFailed,
    RunFinished,
    RunResumed,
    RunStarted,
    SessionStarted,
    StepEvent,
    WarningEvent,
)
from engine.runs.folder import RunFolder, RunState
from engine.runs.foreign_record import with_metrics
from engine.runs.journal import Journal
from engine.runs.log import MAX_COMMAND_LOG_BYTES, LogWriter, PendingLines
from engine.runs.record_completion import with_stored_metrics
from engine.runs.run_config import changed_values, read_changed_config
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record, stored_form, write_summary
from engine.runs.sinks import Sink, describe_error, disk_problem
from engine.runs.tensorboard import TensorBoardWriter
from engine.watch.figures import Figures

if TYPE_CHECKING:
    from engine.watch.parameters import Parameters

Listener = Callable[[Event], None]
# Lists read the record of a live run once a second.
RECORD_INTERVAL_SECONDS = 1.0
# With a tick per second, every second one. On ext4, a rename over a file starts to write it to disk, which takes up to
# 1 ms of CPU time; screens read the metrics of a command from their files.
COMMAND_RECORD_INTERVAL_SECONDS = 1.5


class Follower(Protocol):
    """Follows the events that are recorded, and the clock, and never blocks."""

    def add(self, event: Event) -> None:
        """Follow an event."""

    def poll(self) -> None:
        """Follow the clock."""


class Recorder:
    """Writes every event of a run to its folder and passes it to the listener.

    If the journal cannot be written, as on a full disk, training continues and the events wait in memory. Any other
    file that cannot be written is switched off with a warning, and tried again later.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config | None,
        listener: Listener,
        *,
        command: str = "",
        parameters: Parameters | None = None,
        follower: Follower | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the files of the run folder; without a `config`, it keeps the one that it has.

        `command` is the line of a command and `parameters` are those among its arguments, by default those of the
        record. Of its config, only values that differ from the defaults are stored; its log has a limit. Raises OSError
        if the folder cannot be written to."""
        stored = read_run_record(folder)
        known = NO_RECORD if stored is None else stored
        self._command = command or known.command
        self._parameters = known.command_parameters if parameters is None else parameters
        self.folder = folder
        self._open_files = ExitStack()
        self.opened = folder = self._open_files.enter_context(folder.opened())
        """The folder to which is written: the run may be moved, and another one may take its place."""
        self.history = folder.history()
        self.listener = listener
        folder.control.mkdir(exist_ok=True)
        if not self._command:
            folder.checkpoints.mkdir(exist_ok=True)
        self._config = config
        self._config_values = (
            read_changed_config(folder.config) if config is None else changed_values(self._stored(config))
        )
        self.metrics: Mapping[str, Figures] = {}
        """The metrics of a run of another program, by its names for them."""
        if config is not None and not folder.config.exists():
            self._write_config()
        self._journal = Journal(folder.journal)
        self._log = LogWriter(folder.log, MAX_COMMAND_LOG_BYTES if self._command else None)
        self._pending = PendingLines(folder.log)
        self._tensorboard = TensorBoardWriter(folder.tensorboard)
        self._warnings: list[WarningEvent] = []
        self.problem: str | None = None
        """Why the run folder is not written, as a clause; None if it is."""

        make_sink = partial(Sink, warn=self._warn, on_error=self._report_disk, clock=clock)
        self._state_sink = Sink("the state of the run", self._warn, clock=clock)
        self._log_sink, self._config_sink = make_sink(folder.log.name), make_sink(folder.config.name)
        self._tensorboard_sink = make_sink(f"{folder.tensorboard.name}/")
        self._record_sink = make_sink(folder.summary.name)
        self._follower, self._follower_sink = follower, Sink("the messages", self._warn, clock=clock)
        self._sinks = (self._log_sink, self._config_sink, self._tensorboard_sink, self._record_sink)
        self._config_is_due = self._curves_are_due = self._record_is_due = False
        self._clock, self._recorded_at = clock, -math.inf
        self._recorded: tuple[RunState, str] | None = None
        """State and problem that were written last."""
        self._has_started, self._early_usage = False, None  # type: bool, GpuEvent | None
        record = self._history_record()
        self._earlier_record = stored if self._command else None
        self._run_record = (
            record if record.started_at is not None else codec.replace(record, started_at=round(time.time(), 3))
        )
        self._lock = threading.Lock()
        self.closed = threading.Event()
        if not folder.summary.exists():
            # Lists show the run while its ranks start.
            self._write_record_if_due(force=True)

    def record(self, event: Event, *, notify: bool = True) -> None:
        """Record one event; ignored after `close`. Safe to call from any thread.

        Without `notify`, the event is not passed to the listener, which has received it before.
        """
        with self._lock:
            if not self.closed.is_set():
                self._record(event, self.listener if notify else lambda _: None)

    def show(self, event: Event) -> None:
        """Pass an event to the listener without recording it."""
        self.listener(event)

    def catch_up(self) -> None:
        """Write the record if it is due, and what waits in memory if the disk takes it again. Safe to call from any
        thread."""
        with self._lock:
            if self.closed.is_set():
                return
            if self.problem is None:
                self._write_record_if_due()
            else:
                self._write_journal(self._journal.catch_up)
                self._write_sinks()
                self._report_recovery()
            if self._follower is not None:
                self._follower_sink.attempt(self._follower.poll)
            self._record_warnings()

    def _record(self, event: Event, listener: Listener) -> None:
        if isinstance(event, GpuEvent) and not self._has_started:
            # It belongs to the session that starts, so it is recorded behind its start.
            self._early_usage = event
            return
        if isinstance(event, FlushJournal):
            self._write_journal(self._journal.sync)
        else:
            is_end = isinstance(event, RunFinished)
            self._state_sink.attempt(lambda: self.history.add(event), force=True)
            self._write_journal(lambda: self._journal.append(event))
            self._log.add(self._log_text(event))
            self._record_is_due = True
            if isinstance(event, SessionStarted):
                # Not earlier, because a resume that fails during setup must leave the run unchanged.
                self._config_is_due = self._config is not None
            if isinstance(event, RunStarted):
                if self._config is not None and self._config.data.batch_size == "auto":
                    per_device = event.batch_size // (len(event.devices) // event.world_size)
                    self.set_config(self._config.with_values(data={"batch_size": per_device}))
                with suppress(OSError):
                    self._tensorboard.restart(event.from_step if isinstance(event, RunResumed) else 0)
            if isinstance(event, StepEvent):
                self._tensorboard.add_step(event)
            if isinstance(event, EpochEvent | StepEvent):
                self._curves_are_due = True
            if is_end or isinstance(event, EpochEvent):
                self._write_journal(self._journal.sync)
            self._write_sinks(force=is_end)
            listener(event)
            if (follower := self._follower) is not None:
                self._follower_sink.attempt(lambda: follower.add(event), force=True)
            if is_end:
                self._show_last_warnings()
            if isinstance(event, SessionStarted):
                self._has_started = True
                if (early := self._early_usage) is not None:
                    self._record(codec.replace(early, time=event.time), listener)
                    self._early_usage = None
        self._report_recovery()
        self._record_warnings()

    def _show_last_warnings(self) -> None:
        if self._journal.is_behind:
            self._warn(Problem("", f"the end of the run is not recorded: {self.problem}", code="not-recorded"))
        if self._journal.is_deleted:
            reason = f"{self.folder.journal.name} was deleted during the run: its events are lost"
            self._warn(Problem("", reason, code="not-recorded"))
        # The journal ends with `run_finished`, so these are only shown.
        for warning in self._take_warnings():
            self.listener(warning)
        self.problem = None

    def _write_journal(self, write: Callable[[], None]) -> None:
        was_behind = self._journal.is_behind
        try:
            write()
        except OSError as error:
            if not self._report_disk(error) and self.problem is None:
                self._report_problem(f"{self.folder.journal.name} cannot be written ({describe_error(error)})")
        if was_behind and not self._journal.is_behind:
            for sink in self._sinks:
                sink.retry_now()

    def _report_disk(self, error: Exception) -> bool:
        """Report a full disk once for all files. Return whether that is the error."""
        problem = disk_problem(error)
        if problem is not None and self.problem is None:
            self._report_problem(problem)
        return problem is not None

    def _report_problem(self, problem: str) -> None:
        self.problem = problem
        place = printable(str(self.folder.path))
        reason = f"{problem}: training continues, and its events wait in memory until {place} can be written again"
        self._warn(Problem("", reason, code="not-writable"))

    def _report_recovery(self) -> None:
        if self.problem is None or self._journal.is_behind or any(sink.handled for sink in self._sinks):
            return
        self.problem = None
        self._warn(Problem("", "the run folder can be written again; no event is lost", code="recovered"))

    def _write_sinks(self, *, force: bool = False) -> None:
        """Write what is due to the files that a run can do without."""
        # The smallest first, which fit on a disk that is nearly full.
        self._write_record_if_due(force=force)
        if self._config_is_due:
            self._config_sink.attempt(self._write_config, force=force)
        self._log_sink.attempt(self._log.flush, force=force)
        if self._curves_are_due:
            self._tensorboard_sink.attempt(self._write_curves, force=force)

    def _log_text(self, event: Event) -> str:
        try:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            text = "".join(f"{stamp}  {line}\n" for line in event_lines(event, self.history))
        except Exception as error:
            return f"{event.type}: {printable(describe_error(error))}\n"
        if isinstance(event, RankFailed):
            text += "".join(f"{printable(row)}\n" for row in event.traceback.splitlines())
        return text

    def _write_curves(self) -> None:
        self._tensorboard.write(self.history.epochs, self.history.latest_step)
        self._curves_are_due = False

    def _write_record_if_due(self, *, force: bool = False) -> None:
        """Write the record at a change of the state or of the problem, and else once in an interval."""
        state, problem = self.history.state, self.problem or ""
        changed = self._recorded != (state, problem)
        interval_s = COMMAND_RECORD_INTERVAL_SECONDS if self._command else RECORD_INTERVAL_SECONDS
        is_old = self._clock() - self._recorded_at >= interval_s
        # A run whose resume does not train yet stays one that has ended.
        if force or (self.history.state.live and (changed or (self._record_is_due and is_old))):
            self._recorded, self._recorded_at = (state, problem), self._clock()
            self._record_sink.attempt(lambda: self._write_record(problem, durable=force), force=force)

    def _write_record(self, problem: str, *, durable: bool) -> None:
        record = self._run_record
        # The record must not be ahead of the journal.
        if not self._journal.is_behind and self.history.session_time is not None:
            record = self._history_record()
        if self.metrics:
            record = with_metrics(record, self.metrics)
        else:
            # While a command that is resumed waits, or has written none again.
            record = with_stored_metrics(record, self._earlier_record)
        self._run_record = record = codec.replace(record, problem=problem)
        try:
            write_summary(self.opened.summary, record, durable=durable)
        except OSError:
            # It needs no space on a full disk.
            codec.overwrite_record(self.opened.summary, stored_form(record))
        self._record_is_due = self._journal.is_behind

    def _history_record(self) -> RunRecord:
        """Return the record of the journal. That of a command which waits does not name it yet."""
        record = self.history.record(self._config_values)
        if record.command:
            return record
        return codec.replace(record, command=self._command, command_parameters=dict(self._parameters))

    def set_config(self, config: Config) -> None:
        """Set the config that is written when training starts: the ranks may use other values than were requested."""
        self._config, self._config_values = config, changed_values(self._stored(config))

    def set_metrics(self, metrics: Mapping[str, Figures]) -> None:
        """Set the metrics of a run of another program, by its names for them. Its record has them, not its journal."""
        with self._lock:
            self.metrics, self._record_is_due = metrics, True

    def add_output(self, lines: Sequence[str]) -> None:
        """Add lines that a command has printed to the log."""
        with self._lock:
            if not self.closed.is_set():
                self._log.add("".join(f"{line}\n" for line in lines))
                self._log_sink.attempt(self._log.flush)

    def show_pending(self, lines: Sequence[str]) -> None:
        """Show lines below the log that may still change."""
        with self._lock:
            if not self.closed.is_set():
                self._pending.write(lines)

    def _stored(self, config: Config) -> dict[str, dict[str, Any]]:
        return as_stored(config, only_changed=bool(self._command))

    def _write_config(self) -> None:
        assert self._config is not None  # noqa: S101 - `_config_is_due` says so
        text = to_yaml(self._stored(self._config))
        replace_file(self.opened.config, lambda file: file.write(text.encode()), durable=True)
        self._config_is_due = False

    def _warn(self, problem: Problem) -> None:
        # The owner ends the run of a folder that is gone, with one sentence.
        if not self.folder.is_gone:
            self._warnings.append(WarningEvent.of(problem))

    def _take_warnings(self) -> list[WarningEvent]:
        warnings, self._warnings = self._warnings, []
        return warnings

    def _record_warnings(self) -> None:
        """Record the warnings about the files. Each is new, so this ends: a file that fails is not tried again."""
        for warning in self._take_warnings():
            self._record(warning, self.listener)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            if self._command:
                self._pending.close()
        with suppress(OSError):
            self._tensorboard.close()
        self._journal.close()
        self._log.close()
        self._open_files.close()
