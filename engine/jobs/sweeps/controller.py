"""The controller of a sweep: proposes trials, starts them as runs, prunes them and records their results.

A kill at any moment loses nothing, because each step is recorded before the next one:

1. The journal gets the trial with all its values, running, and with it the number that names its run.
2. The command of the run is started. A controller that is started later finds a running trial without a run and starts
   it, or finds its run and watches it.
3. Epochs, or the steps of a script's metric, are recorded as they appear in the files of the run, and the decision to
   prune before the stop request.
4. When the run has ended, the result is recorded, which ends the trial. Until then, each later controller reads it from
   the run again.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.base.errors import Problem
from engine.base.exit_codes import ExitCode
from engine.base.process import SignalHandler
from engine.base.text import pluralize, printable
from engine.config.notify_section import Occasion
from engine.config.schema import Config
from engine.jobs.launch.supervise import requeue_clause
from engine.jobs.notify.message import make_end_message
from engine.jobs.notify.run_messages import is_notified
from engine.jobs.notify.sender import send_message
from engine.jobs.sweeps.best import best_command, write_best
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.plan import SweepPlan, divide_gpus
from engine.jobs.sweeps.settings import SweepSettings
from engine.jobs.sweeps.study import GPUS, PRESET, PRUNED_AT, REASON, TASK, SweepStudy
from engine.jobs.sweeps.trial import Trial, TrialEnd, make_trial
from engine.runs.batch.job import cancel_job
from engine.runs.control import consume_requests
from engine.runs.run_record import NO_RECORD, read_run_record

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TICK_SECONDS = 0.3
# The sweep ends when its first trials have all failed for one reason: so would the others.
MAX_EQUAL_FAILURES = 3
STATE_WORDS = {"RUNNING": "running", "WAITING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
# What a running trial is once the controller has ended.
END_WORDS = {"running": "stopped"}
Emit = Callable[[str], None]


@dataclass
class Controller:
    """Runs the trials of one sweep until all have ended, or until it is asked to stop.

    `command` is the beginning of the command line of `gputrain`, `flags` are passed to each trial. The caller holds the
    lock of the sweep. With `task`, the ID of a job of an array, it runs one trial, and other jobs the others.
    """

    folder: SweepFolder
    plan: SweepPlan
    study: SweepStudy
    command: Sequence[str]
    flags: Sequence[str]
    emit: Emit
    signals: SignalHandler = field(default_factory=SignalHandler)
    task: str = ""
    _active: dict[int, Trial] = field(default_factory=dict)
    _queued: list[Trial] = field(default_factory=list)
    _stopping: bool = False

    @property
    def settings(self) -> SweepSettings:
        return self.plan.settings

    def run(self) -> ExitCode:
        """Run the sweep. Returns FINISHED, STOPPED if it can go on, or FAILED if no trial has a result."""
        self._recover()
        while True:
            self._poll_requests()
            for trial in list(self._active.values()):
                if self._stopping:
                    trial.request_stop()
                self._poll(trial)
            self._start_trials()
            if not self._active and (self._stopping or not self._queued):
                return self._end()
            time.sleep(TICK_SECONDS)

    def _recover(self) -> None:
        """Take up the trials of an earlier controller: watch those that run or have ended, queue the others."""
        if self.task:
            self._claim_trial()
        for frozen in self.study.unfinished(self.task):
            trial = make_trial(self.folder, self.plan, frozen.number, is_recovered=True)
            ended = trial.poll()
            if ended is None:
                self.emit(f"trial {trial.number} ({trial.folder.name}) is still running")
            if ended in (None, TrialEnd.FINISHED, TrialEnd.FAILED) or PRUNED_AT in frozen.user_attrs:
                self._active[trial.number] = trial
            else:
                self._queued.append(trial)

    def _claim_trial(self) -> None:
        """Take over a trial of an earlier array, if this task has none."""
        array = self.task.partition("_")[0]
        with self.study.lock:
            if not self.study.has_task(self.task):
                left = (t for t in self.study.unfinished() if t.user_attrs.get(TASK, "").partition("_")[0] != array)
                for frozen in itertools.islice(left, 1):
                    self.study.set_attribute(frozen.number, TASK, self.task)

    def _poll_requests(self) -> None:
        stops = [request.by for request in consume_requests(self.folder.control) if request.request == "stop"]
        by = next(iter(stops), self.signals.signal_name)
        if by is not None and not self._stopping:
            self._stopping = True
            how = "will be ended" if self.settings.command else "will save a checkpoint"
            self.emit(f"stopping on request of {by}: {pluralize(len(self._active), 'trial')} {how}")
        for trial in self._active.values() if self.signals.kill_requested else ():
            trial.kill()

    def _start_trials(self) -> None:
        """Start queued and new trials until `parallel` run."""
        while len(self._active) < (1 if self.task else self.settings.parallel) and not self._stopping:
            trial = self._queued.pop(0) if self._queued else self._add_trial()
            if trial is None:
                return
            self._start(trial)

    def _add_trial(self) -> Trial | None:
        """Record the next trial; None if there is none."""
        with self.study.lock:
            number = len(self.study.trials())
            if number >= self.settings.trials or (self.task and self.study.has_task(self.task)):
                return None
            is_preset = number == 0 and not self.settings.command
            params = self.plan.preset if is_preset else self.study.propose()
            if params is None:
                return None
            self.study.add(params, {PRESET: is_preset} | ({TASK: self.task} if self.task else {}))
        return make_trial(self.folder, self.plan, number)

    def _start(self, trial: Trial) -> None:
        number, device = trial.number, {str(key): text for key, text in self.settings.device.items()}
        shares = divide_gpus(device["device.gpus"], self.settings.parallel)
        if len(shares) > 1:
            used = {self.study.trial(each).user_attrs.get(GPUS) for each in self._active}
            # Trials of a controller with another number of parallel ones may have others: then, this one waits.
            device["device.gpus"] = next((share for share in shares if share not in used), shares[0])
            # A controller that is started later gives other trials the other GPUs.
            self.study.set_attribute(number, GPUS, device["device.gpus"])
        frozen = self.study.trial(number)
        trial.start(self.command, self.flags, frozen.params, device)
        self._active[number] = trial
        values = " ".join(f"{key}={shown(value)}" for key, value in frozen.params.items())
        verb = "started" if frozen.last_step is None else "starts again" if self.settings.command else "continues"
        what = "the config itself" if frozen.user_attrs.get(PRESET) else values
        self.emit(f"trial {number} ({trial.folder.name}) {verb}: {what}")

    def _poll(self, trial: Trial) -> None:
        """Record new values of the metric, decide after each whether to prune the trial, and record its end."""
        ended, number = trial.poll(), trial.number
        frozen = self.study.trial(number)
        # The config itself is the baseline of the others.
        may_prune = ended is None and not frozen.user_attrs.get(PRESET)
        for step, value in trial.values(to_end=ended is not None).items():
            if step in frozen.intermediate_values:
                continue
            self.study.report(number, step, value)
            length = trial.length(self.study.trials())
            is_pruned = PRUNED_AT in self.study.trial(number).user_attrs
            # Optuna compares a trial only with those that it was asked about, so trial 0 is asked about, too.
            is_poor = not is_pruned and step < length and self.study.should_prune(number, length)
            if is_poor and may_prune:
                self.study.set_attribute(number, PRUNED_AT, step)
        if ended is not None:
            self._record_end(trial, ended)
        elif PRUNED_AT in self.study.trial(number).user_attrs:
            trial.request_stop()

    def _record_end(self, trial: Trial, ended: TrialEnd) -> None:
        """Record the result of a trial whose run has ended, or start the run again."""
        number, frozen = trial.number, self.study.trial(trial.number)
        pruned_at = frozen.user_attrs.get(PRUNED_AT)
        if ended is TrialEnd.FINISHED:
            self._complete(trial)
        elif ended is TrialEnd.FAILED:
            self._fail(trial, trial.reason(ended))
        elif pruned_at is not None:
            self._prune(trial, f"pruned after {self.settings.step_name} {pruned_at}", pruned_at)
        elif self._stopping:
            self.emit(f"trial {number} {ended}; it goes on with the sweep")
        elif ended is TrialEnd.STOPPED_BY_USER:
            self._prune(trial, "stopped by a user", frozen.last_step)
        elif ended is TrialEnd.STOPPED or (ended is TrialEnd.REFUSED and trial.is_recovered):
            # By a signal to its process; or the run that an earlier controller has started has begun meanwhile.
            trial.is_recovered = False
            self._start(trial)
            return
        else:
            trial.clean_up()
            self._fail(trial, trial.reason(ended))
        del self._active[number]
        trial.release()

    def _complete(self, trial: Trial) -> None:
        result, previous = trial.result(), self.study.best()
        if isinstance(result, Problem):
            self._fail(trial, result)
            return
        value, val_loss = result
        divergence = printable((read_run_record(trial.folder) or NO_RECORD).divergence)
        self.study.end(trial.number, "COMPLETE", value, val_loss=val_loss, reason=divergence)
        best = self.study.best()
        note = ""
        if best is not None:
            note = f" (best so far {shown(best.value)}, trial {best.number})"
            if previous is None or previous.number != best.number:
                write_best(self.folder, self.settings, best)
        self.emit(f"trial {trial.number} finished: {self.settings.metric_name} {shown(value)}{note}")
        if divergence:
            self.emit(f"trial {trial.number}: {divergence}")

    def _prune(self, trial: Trial, reason: str, step: int | None) -> None:
        self.study.end(trial.number, "PRUNED", reason=reason, code="stopped")
        value = self.study.trial(trial.number).intermediate_values.get(-1 if step is None else step, math.nan)
        known = f"{self.settings.metric_name} {shown(value)}"
        value_text = known if math.isfinite(value) else f"no {self.settings.step_name} has a result"
        self.emit(f"trial {trial.number} {reason}: {value_text}")

    def _fail(self, trial: Trial, reason: Problem) -> None:
        self.study.end(trial.number, "FAIL", reason=str(reason), code=reason.code)
        self.emit(f"trial {trial.number} failed: {reason}")
        if self._is_hopeless():
            self.emit(f"the first {MAX_EQUAL_FAILURES} trials failed for the same reason, so the sweep ends here")
            self._stopping = True

    def _is_hopeless(self) -> bool:
        """Whether all trials that have ended, and several, failed for one reason."""
        reasons = [each.user_attrs.get(REASON) for each in self.study.trials() if each.state.name == "FAIL"]
        return not self._has_result() and len(reasons) >= MAX_EQUAL_FAILURES and len(set(reasons)) == 1

    def _has_result(self) -> bool:
        return any(trial.state.name in ("COMPLETE", "PRUNED") for trial in self.study.trials())

    def _end(self) -> ExitCode:
        trials, best = self.study.trials(), self.study.best()
        if self.task and (code := self._end_task(trials)) is not None:
            return code
        counts = Counter(STATE_WORDS[trial.state.name] for trial in trials)
        listed = ", ".join(f"{count} {END_WORDS.get(word, word)}" for word, count in sorted(counts.items()))
        lines = [f"{pluralize(len(trials), 'trial')}: {listed}"]
        failed = [trial for trial in trials if trial.state.name == "FAIL"]
        lines += [f"trial {trial.number} failed: {trial.user_attrs.get(REASON, '')}" for trial in failed]
        if best is not None:
            write_best(self.folder, self.settings, best)
            again = best_command(self.folder, self.settings, best.params)
            lines.append(f"best: trial {best.number}, {self.settings.metric_name} {shown(best.value)}; {again}")
        code = ExitCode.FINISHED if self._has_result() else ExitCode.FAILED
        is_ended_early = len(trials) < self.settings.trials and self._stopping and self._has_result()
        if counts["running"] or is_ended_early:
            lines.append(f"continue with `gputrain sweep resume {self.folder.name}`")
            code = ExitCode.STOPPED
        for line in lines:
            self.emit(line)
        for problem in send_end(self.folder, self.plan.config, code, lines):
            self.emit(str(problem))
        return code

    def _end_task(self, trials: Sequence[FrozenTrial]) -> ExitCode | None:
        """Return the exit code of a task that ends before the sweep does. The jobs of a sweep that ends early are
        cancelled."""
        if self.study.unfinished(self.task):
            if self.signals.time_limit_near:
                self.emit(f"{self.task} has reached its time limit{requeue_clause()}")
            return ExitCode.STOPPED
        if self._is_hopeless():
            cancel_job(self.folder)
            return None
        return ExitCode.FINISHED if self.study.unfinished() or len(trials) < self.settings.trials else None


def send_end(folder: SweepFolder, config: Config, code: ExitCode, lines: Sequence[str]) -> list[Problem]:
    """Send the message about the end of a sweep, whose last log `lines` say how it went. Return why it was not sent."""
    ends: dict[ExitCode, Occasion] = {ExitCode.FINISHED: "finished", ExitCode.STOPPED: "stopped"}
    occasion = ends.get(code, "failed")
    if occasion not in config.notify.when or not is_notified(config):
        return []
    message = make_end_message(occasion, f"sweep {folder.name}", socket.gethostname(), lines)
    deliveries = send_message(message, config.notify.urls)
    return [
        Problem("", f"no message was sent: {delivery.line}", code=delivery.code)
        for delivery in deliveries
        if not delivery.sent
    ]


def shown(value: Any) -> str:
    """Return a value of a trial in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
