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

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.runs.control import consume_requests
from engine.runs.metrics import Metric
from engine.runs.run_record import NO_RECORD, read_run_record
from engine.runs.trials import BestTrial
from engine.sweeps.folder import SweepFolder
from engine.sweeps.messages import send_end
from engine.sweeps.plan import SweepPlan, divide_gpus
from engine.sweeps.settings import SweepSettings, pruning_warnings
from engine.sweeps.study import CRASHES, GPUS, PRESET, PRUNED_AT, RUN, VAL_LOSS, SweepStudy
from engine.sweeps.trial_kinds import best_command, kind_of
from engine.sweeps.trial_run import Ended, TrialRun
from engine.utils.codec import write_record
from engine.utils.errors import Problem
from engine.utils.exit_codes import ExitCode
from engine.utils.process import SignalHandler
from engine.utils.text import pluralize, printable

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TICK_SECONDS = 0.3
# A trial that crashes this often without a new epoch has failed.
MAX_CRASHES = 3
# The sweep ends when its first trials have all failed for one reason: so would the others.
MAX_EQUAL_FAILURES = 3
Emit = Callable[[str], None]


@dataclass
class Controller:
    """Runs the trials of one sweep until all have ended, or until it is asked to stop.

    `command` is the beginning of the command line of `gputrain`, `flags` are passed to each trial. The caller holds the
    lock of the sweep.
    """

    folder: SweepFolder
    plan: SweepPlan
    study: SweepStudy
    command: Sequence[str]
    flags: Sequence[str]
    emit: Emit
    signals: SignalHandler = field(default_factory=SignalHandler)

    def __post_init__(self) -> None:
        self._kind = kind_of(self.folder, self.plan)
        self._active: dict[int, TrialRun] = {}
        self._queued: list[TrialRun] = []
        self._stopping = self._exhausted = False
        self._failures: list[Problem] = []
        self._has_result = False

    @property
    def settings(self) -> SweepSettings:
        return self.plan.settings

    def run(self) -> ExitCode:
        """Run the sweep. Returns FINISHED, STOPPED if it can go on, or FAILED if no trial has a result."""
        self._recover()
        while True:
            self._poll_requests()
            for trial in list(self._active.values()):
                self._poll(trial)
                if self._stopping:
                    trial.request_stop()
            if not self._stopping:
                self._start_trials()
            if not self._active and (self._stopping or not self._queued):
                break
            time.sleep(TICK_SECONDS)
        return self._end()

    def _recover(self) -> None:
        """Watch the runs of the trials that an earlier controller has left running, and queue those that do not run."""
        for trial in self.study.trials():
            if not trial.state.is_finished() and not self._is_in_space(trial):
                self.study.fail(
                    trial.number, Problem("", "its values are not in the space of the sweep", code="conflict")
                )
            elif not trial.state.is_finished():
                run = self._trial_run(trial.number, may_be_starting=True)
                if run.folder.is_owned():
                    self._active[trial.number] = run
                    self.emit(f"trial {trial.number} ({run.folder.name}) is still running")
                else:
                    self._queued.append(run)
            self._has_result = self._has_result or trial.value is not None

    def _trial_run(self, number: int, *, may_be_starting: bool = False) -> TrialRun:
        folder = self.folder.trial(number)
        return TrialRun(number, folder, self._kind.refusals, may_be_starting=may_be_starting)

    def _is_in_space(self, trial: FrozenTrial) -> bool:
        """Whether the values of a trial in the journal, which become arguments of a command, are those of the sweep."""
        spaces = self.settings.spaces()
        # A preset lacks those of its values that are not in the space.
        is_whole = bool(trial.user_attrs.get(PRESET)) or trial.params.keys() == spaces.keys()
        return is_whole and all(key in spaces and spaces[key].contains(value) for key, value in trial.params.items())

    def _poll_requests(self) -> None:
        for request in consume_requests(self.folder.control):
            if request.request == "stop":
                self._stop(request.by)
        if self.signals.signal_name is not None:
            self._stop(self.signals.signal_name)
        if self.signals.kill_requested:
            for trial in self._active.values():
                trial.kill()

    def _stop(self, by: str) -> None:
        if self._stopping:
            return
        self._stopping = True
        how = "will be ended" if self.settings.command else "will save a checkpoint"
        self.emit(f"stopping on request of {by}: {pluralize(len(self._active), 'trial')} {how}")

    def _start_trials(self) -> None:
        """Start queued and new trials until `parallel` run."""
        while self._may_start():
            if self._queued:
                self._continue(self._queued.pop(0))
            elif not self._start_new_trial():
                return

    def _may_start(self) -> bool:
        """Whether the next trial may start now."""
        return len(self._active) < self.settings.parallel and not self._stopping

    def _start_new_trial(self) -> bool:
        number = len(self.study.trials())
        if number >= self.settings.trials or self._exhausted:
            return False
        is_preset = number == 0 and not self.settings.command
        params = self.plan.preset if is_preset else self.study.propose()
        if params is None:
            self._exhausted = True
            return False
        trial = self._trial_run(number)
        self.study.add(params, {RUN: trial.folder.name, PRESET: is_preset})
        self._start(trial)
        return True

    def _continue(self, trial: TrialRun) -> None:
        """Take up a trial whose run does not run: read its result if it has one, else start its command again."""
        ended = trial.poll()
        if ended is None:
            self._active[trial.number] = trial
        elif ended in (Ended.FINISHED, Ended.FAILED) or self._is_pruned(trial):
            self._active[trial.number] = trial
            self._record_values(trial, ended)
            self._record_end(trial, ended)
        else:
            self._start(trial)

    def _start(self, trial: TrialRun) -> None:
        frozen = self.study.trial(trial.number)
        is_preset, device = bool(frozen.user_attrs.get(PRESET)), dict(self.settings.device)
        shares = divide_gpus(device["device.gpus"], self.settings.parallel)
        if len(shares) > 1:
            device["device.gpus"] = self._free_share(shares)
            # A controller that is started later gives other trials the other GPUs.
            self.study.set_attribute(trial.number, GPUS, device["device.gpus"])
        self._kind.clean_up(trial)
        start = self._kind.start(frozen.params, device, is_preset=is_preset)
        runs_dir = self.folder.path.parent
        arguments = ["run", "--headless", *start.arguments, "--name", trial.folder.name, "--resume"]
        arguments += ["--runs-dir", str(runs_dir), *self.flags, *(["--", *start.words] if start.words else [])]
        trial.start([*self.command, *arguments], runs_dir, start.environ)
        self._active[trial.number] = trial
        values = " ".join(f"{key}={shown(value)}" for key, value in frozen.params.items())
        verb = "started" if frozen.last_step is None else "starts again" if self.settings.command else "continues"
        self.emit(f"trial {trial.number} ({trial.folder.name}) {verb}: {'the config itself' if is_preset else values}")

    def _free_share(self, shares: Sequence[str]) -> str:
        """Return the GPUs that no active trial has."""
        used = {self.study.trial(number).user_attrs.get(GPUS) for number in self._active}
        # Trials of a controller with another number of parallel ones may have others: then, this one waits.
        return next((share for share in shares if share not in used), shares[0])

    def _is_pruned(self, trial: TrialRun) -> bool:
        """Whether the decision to prune the trial is recorded."""
        return PRUNED_AT in self.study.trial(trial.number).user_attrs

    def _poll(self, trial: TrialRun) -> None:
        ended = trial.poll()
        self._record_values(trial, ended)
        if ended is not None:
            self._record_end(trial, ended)
        elif self._is_pruned(trial):
            trial.request_stop()

    def _record_values(self, trial: TrialRun, ended: Ended | None) -> None:
        """Record new values of the metric, and decide after each whether to prune the trial, unless it has ended."""
        frozen = self.study.trial(trial.number)
        recorded = frozen.intermediate_values
        # The config itself is the baseline of the others.
        may_prune = ended is None and not frozen.user_attrs.get(PRESET) and not self._is_pruned(trial)
        for step, value in self._kind.new_values(trial, has_ended=ended is not None):
            if step in recorded:
                continue
            self.study.report(trial.number, step, value)
            total = self._kind.planned(trial, self.study.trials())
            if may_prune and step < total and self.study.should_prune(trial.number, total):
                self.study.set_attribute(trial.number, PRUNED_AT, step)
                may_prune = False

    def _record_end(self, trial: TrialRun, ended: Ended) -> None:
        """Record the result of a trial whose run has ended, or start the run again."""
        number = trial.number
        pruned_at = self.study.trial(number).user_attrs.get(PRUNED_AT)
        if ended is Ended.FINISHED:
            self._complete(trial)
        elif ended is Ended.FAILED:
            self._fail(trial, trial.reason(ended))
        elif pruned_at is not None:
            when = f"pruned after {self.settings.step_name} {pruned_at}"
            self.study.prune(number, Problem("", when, code="stopped"))
            self._has_result = True
            self.emit(f"trial {number} {when}: {self._value_text(number, pruned_at)}")
        elif self._stopping:
            self.emit(f"trial {number} {ended}; it goes on with the sweep")
        elif ended is Ended.STOPPED_BY_USER:
            self.study.prune(number, Problem("", "stopped by a user", code="stopped"))
            last_step = self.study.trial(number).last_step
            self.emit(f"trial {number} was stopped by a user: {self._value_text(number, last_step)}")
        elif ended is Ended.REFUSED and not trial.may_be_starting:
            self._fail(trial, trial.reason(ended))
        elif self._may_restart(trial, ended):
            trial.may_be_starting = False
            self._start(trial)
            return
        del self._active[number]
        trial.release()

    def _may_restart(self, trial: TrialRun, ended: Ended) -> bool:
        """Count a crash; after `MAX_CRASHES` without a new value, the trial has failed."""
        if ended is Ended.REFUSED:
            return True
        epochs = len(self.study.trial(trial.number).intermediate_values)
        before = self.study.trial(trial.number).user_attrs.get(CRASHES, {})
        count = 1 + (before.get("count", 0) if before.get("epochs") == epochs else 0)
        self.study.set_attribute(trial.number, CRASHES, {"count": count, "epochs": epochs})
        if count < MAX_CRASHES:
            self.emit(f"trial {trial.number} {ended}; it starts again")
            return True
        self._kind.clean_up(trial)
        reason = Problem("", f"{ended} {count} times without a new {self.settings.step_name}", code="run-failed")
        self._fail(trial, reason)
        return False

    def _complete(self, trial: TrialRun) -> None:
        result = self._kind.result(trial)
        if isinstance(result, Problem):
            self._fail(trial, result)
            return
        previous = self._best()
        divergence = printable((read_run_record(trial.folder) or NO_RECORD).divergence)
        self.study.complete(trial.number, *result, divergence)
        self._has_result = True
        best = self._best()
        note = ""
        if best is not None:
            note = f" (best so far {shown(best.value)}, trial {best.number})"
            if previous is None or previous.number != best.number:
                self._write_best(best)
        self.emit(f"trial {trial.number} finished: {self.settings.metric_name} {shown(result.value)}{note}")
        if divergence:
            self.emit(f"trial {trial.number}: {divergence}")

    def _fail(self, trial: TrialRun, reason: Problem) -> None:
        self.study.fail(trial.number, reason)
        self._failures.append(reason)
        self.emit(f"trial {trial.number} failed: {reason}")
        if not self._has_result and len(self._failures) >= MAX_EQUAL_FAILURES and len(set(self._failures)) == 1:
            self.emit(f"the first {len(self._failures)} trials failed for the same reason, so the sweep ends here")
            self._stopping = True

    def _best(self) -> FrozenTrial | None:
        return best_trial(self.study.trials(), self.settings.objective)

    def _value_text(self, number: int, step: int | None) -> str:
        """Return the value that a trial had at a step."""
        value = self.study.trial(number).intermediate_values.get(-1 if step is None else step, math.nan)
        name = self.settings.step_name
        return f"{self.settings.metric_name} {shown(value)}" if math.isfinite(value) else f"no {name} has a result"

    def _write_best(self, best: FrozenTrial) -> None:
        self._kind.write_best(best, {} if best.user_attrs.get(PRESET) else best.params)
        write_record(self.folder.best_trial, BestTrial(run=self.folder.trial(best.number).name))

    def _end(self) -> ExitCode:
        trials = self.study.trials()
        counts = Counter(STATE_WORDS[trial.state.name] for trial in trials)
        listed = ", ".join(f"{count} {END_WORDS.get(word, word)}" for word, count in sorted(counts.items()))
        lines = [f"{pluralize(len(trials), 'trial')}: {listed}"]
        lines += [
            f"trial {trial.number} failed: {trial.user_attrs.get('reason', '')}"
            for trial in trials
            if trial.state.name == "FAIL"
        ]
        best = self._best()
        if best is not None:
            self._write_best(best)
            value = f"{self.settings.metric_name} {shown(best.value)}"
            again = best_command(self.folder, self.settings, best.params)
            lines.append(f"best: trial {best.number}, {value}; {again}")
        lines += pruning_warnings(self.settings, counts)
        code = ExitCode.FINISHED if self._has_result else ExitCode.FAILED
        is_ended_early = len(trials) < self.settings.trials and self._stopping and self._has_result
        if counts["running"] or is_ended_early:
            lines.append(f"continue with `gputrain sweep resume {self.folder.name}`")
            code = ExitCode.STOPPED
        for line in lines:
            self.emit(line)
        for problem in send_end(self.folder, self.plan.config, code, lines):
            self.emit(str(problem))
        return code


STATE_WORDS = {"RUNNING": "running", "WAITING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
# What a running trial is once the controller has ended.
END_WORDS = {"running": "stopped"}


def best_trial(trials: Sequence[FrozenTrial], metric: Metric) -> FrozenTrial | None:
    """Return the best completed trial, see `Metric.rank`, the first of equals; None if there is none."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE" and trial.value is not None]
    return max(
        complete,
        key=lambda trial: metric.rank(trial.value, trial.user_attrs.get(VAL_LOSS), -trial.number),
        default=None,
    )


def shown(value: Any) -> str:
    """Return a value of a trial in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
