"""One trial of a sweep as a run: start its command, follow its journal, stop it, and say how it ended.

The command is `gputrain run --resume --name NAME-007`, which begins the run, continues it or has nothing to do; of a
script, it starts an interrupted one again. It can
therefore be started again after a crash at any moment; the lock of the run folder keeps two of them apart.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from engine.launch.detached import LaunchedRun, start_detached
from engine.runs.claim import read_claim
from engine.runs.control import send_request
from engine.runs.events import ControlEvent, RunFinished
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.metrics import Metric
from engine.utils.errors import Problem, UsageError
from engine.utils.exit_codes import ExitCode
from engine.utils.process import STOP_SIGNALS
from engine.utils.text import printable

REQUEST_INTERVAL_SECONDS = 5.0
MAX_REASON_CHARACTERS = 500


class Ended(StrEnum):
    """How a session of a trial ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """On request of the controller or by a signal: it can go on."""
    STOPPED_BY_USER = "stopped by a user"
    CRASHED = "crashed"
    """Without a result, or before it began."""
    REFUSED = "refused"
    """The command refused the config."""


class TrialResult(NamedTuple):
    """The best value of a trial, and the validation loss of that epoch; None if it is unknown."""

    value: float
    val_loss: float | None = None


@dataclass
class TrialRun:
    """The run of one trial.

    `process` is the command if this controller has started it. `may_be_starting` means that an earlier controller may
    have started one just before it was killed.
    """

    number: int
    folder: RunFolder
    refusals: Sequence[int] = (ExitCode.USAGE_ERROR, ExitCode.FAILED)
    """Exit codes of a command that refuses to run."""
    process: LaunchedRun | None = None
    may_be_starting: bool = False
    stop_requested: bool = False
    """Whether this controller has asked the current session to stop."""
    history: History = field(default_factory=History)
    _stopped_by: str = ""
    _requested_at: float = -math.inf
    _reader: JournalReader | None = None
    _earlier_end: RunFinished | None = None
    """How the session before the one of `process` ended."""

    def start(self, command: Sequence[str], runs_dir: Path, environ: Mapping[str, str] | None = None) -> None:
        """Start the command of the trial, by default in the environment of this process.

        Raises UsageError if it cannot be started.
        """
        self.release()
        self.stop_requested, self._stopped_by, self._requested_at = False, "", -math.inf
        # A refused start deletes the folder with its journal again.
        self._reader, self.history = None, History()
        self._earlier_end = self.folder.history().finished
        self.process = start_detached(command, runs_dir, environ=os.environ if environ is None else environ)

    def release(self) -> None:
        """Close the output of the last command."""
        if self.process is not None:
            self.process.output.close()
            self.process = None

    def poll(self) -> Ended | None:
        """Read new events of the journal; return how the session ended, None while it goes on."""
        # Before the journal, whose last events an owner writes before it releases the run.
        code = self.process.exit_code if self.process is not None else None
        is_live = (self.process is not None and code is None) or self.folder.is_owned()
        self._read_journal()
        if is_live:
            return None
        return self._ended(code)

    def _read_journal(self) -> None:
        self._reader = self._reader or JournalReader(self.folder.journal)
        for event in self._reader.poll():
            self.history.add(event)
            if isinstance(event, ControlEvent) and event.request == "stop":
                self._stopped_by = event.by

    def _ended(self, code: int | None) -> Ended:
        finished = self.history.finished
        if self.process is not None and (finished is None or finished == self._earlier_end):
            if code == ExitCode.FINISHED and finished is not None and finished.state == RunState.FINISHED:
                # The run had finished before, and its command had nothing to do.
                return Ended.FINISHED
            return Ended.REFUSED if code in self.refusals else Ended.CRASHED
        if finished is None:
            return Ended.CRASHED
        if finished.state == RunState.STOPPED:
            by_signal = self._stopped_by in {number.name for number in STOP_SIGNALS}
            is_ours = self.stop_requested or by_signal or self.process is None
            return Ended.STOPPED if is_ours else Ended.STOPPED_BY_USER
        return Ended.FINISHED if finished.state == RunState.FINISHED else Ended.FAILED

    def request_stop(self) -> None:
        """Ask the run to stop with a checkpoint; a command that owns no run yet is ended.

        Can be called repeatedly: the request is repeated while the journal does not show it, because a run that resumes
        drops earlier requests.
        """
        now = time.monotonic()
        if self.history.stopping or now - self._requested_at < REQUEST_INTERVAL_SECONDS:
            return
        self.stop_requested, self._requested_at = True, now
        if self.folder.is_owned():
            with suppress(UsageError):
                send_request(self.folder.control, "stop")
        elif self.process is not None and self.process.exit_code is None:
            self.process.process.terminate()

    def kill(self) -> None:
        """Kill the supervisor of the run; its ranks die with it."""
        if self.process is not None:
            self.process.process.kill()
        elif self.folder.is_owned():
            # The controller may run in another container, or on another host, than the one that started the run.
            claim = read_claim(self.folder.owner)
            if claim is not None and claim.pid is not None and claim.is_process_here:
                with suppress(OSError):
                    os.kill(claim.pid, signal.SIGKILL)

    def reason(self, ended: Ended) -> Problem:
        """Return why the trial has no result, as text without the name of its run."""
        if ended is Ended.REFUSED and self.process is not None:
            errors = [line for line in self.process.output_lines() if line.startswith(("error: ", "failed: "))]
            text = "; ".join(errors) or "\n".join(self.process.output_lines()[-1:])
        elif self.history.finished is not None and ended is Ended.FAILED:
            text = self.history.finished.message
        else:
            text = str(ended)
        code = self.history.failures[-1].code if ended is Ended.FAILED and self.history.failures else ""
        text = printable(text.replace(self.folder.name, "RUN"))[:MAX_REASON_CHARACTERS]
        return Problem("", text or str(ended), code=code or "run-failed")


def result_of(history: History, metric: Metric) -> TrialResult | None:
    """Return the result of a run, that of its best epoch; None if no epoch has a finite value."""
    best = metric.best_of(history.epochs)
    value = None if best is None else metric.of_epoch(best)
    return None if best is None or value is None else TrialResult(value, best.selection_loss)
