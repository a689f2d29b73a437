"""The controller of a sweep: proposes trials, starts them as runs, prunes them and records their results.

A kill at any moment loses nothing, because each step is recorded before the next one:

1. The journal gets the trial with all its values, running, and with it the number that names its run.
2. The command of the run is started. A controller that is started later finds a running trial without a run and starts
   it, or finds its run and watches it.
3. Epochs are recorded as they appear in the journal of the run, and the decision to prune before the stop request.
4. When the run has ended, the result is recorded, which ends the trial. Until then, each later controller reads it from
   the run again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.control import consume_requests
from engine.runs.metrics import Metric
from engine.sweeps.folder import SweepFolder
from engine.sweeps.messages import send_end, trial_override
from engine.sweeps.plan import SweepPlan, without_name
from engine.sweeps.settings import SweepSettings
from engine.sweeps.space import overrides_of
from engine.sweeps.study import CRASHES, PRESET, PRUNED_AT, RUN, SweepStudy
from engine.sweeps.trial_run import Ended, TrialRun, result_of
from engine.utils.errors import Problem
from engine.utils.exit_codes import ExitCode
from engine.utils.files import replace_file
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
                run = TrialRun(trial.number, self.folder.trial(trial.number), may_be_starting=True)
                if run.folder.is_owned():
                    self._active[trial.number] = run
                    self.emit(f"trial {trial.number} ({run.folder.name}) is still running")
                else:
                    self._queued.append(run)
            self._has_result = self._has_result or trial.value is not None

    def _is_in_space(self, trial: FrozenTrial) -> bool:
        """Whether the values of a trial in the journal, which become arguments of a command, are those of the sweep."""
        spaces = self.settings.spaces()
        return all(key in spaces and spaces[key].contains(value) for key, value in trial.params.items())

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
        self.emit(f"stopping on request of {by}: {pluralize(len(self._active), 'trial')} will save a checkpoint")

    def _start_trials(self) -> None:
        """Start queued and new trials until `parallel` run."""
        while len(self._active) < self.settings.parallel and not self._stopping:
            if self._queued:
                self._continue(self._queued.pop(0))
            elif not self._start_new_trial():
                return

    def _start_new_trial(self) -> bool:
        number = len(self.study.trials())
        if number >= self.settings.trials or self._exhausted:
            return False
        is_preset = number == 0
        params = self.plan.preset if is_preset else self.study.propose()
        if params is None:
            self._exhausted = True
            return False
        trial = TrialRun(number, self.folder.trial(number))
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
            self._record_epochs(trial, ended)
            self._record_end(trial, ended)
        else:
            self._start(trial)

    def _start(self, trial: TrialRun) -> None:
        frozen = self.study.trial(trial.number)
        verb = "continues" if trial.history.epochs else "started"
        overrides = [] if frozen.user_attrs.get(PRESET) else overrides_of(frozen.params)
        overrides += [*overrides_of(self.settings.device), trial_override(self.plan.config)]
        runs_dir = self.folder.path.parent
        arguments = ["run", "--headless", str(self.folder.config), *overrides, "--name", trial.folder.name, "--resume"]
        trial.start([*self.command, *arguments, "--runs-dir", str(runs_dir), *self.flags], runs_dir)
        self._active[trial.number] = trial
        values = " ".join(f"{key}={shown(value)}" for key, value in frozen.params.items())
        what = "the config itself" if frozen.user_attrs.get(PRESET) else values
        self.emit(f"trial {trial.number} ({trial.folder.name}) {verb}: {what}")

    def _is_pruned(self, trial: TrialRun) -> bool:
        """Whether the decision to prune the trial is recorded."""
        return PRUNED_AT in self.study.trial(trial.number).user_attrs

    def _poll(self, trial: TrialRun) -> None:
        ended = trial.poll()
        self._record_epochs(trial, ended)
        if ended is not None:
            self._record_end(trial, ended)
        elif self._is_pruned(trial):
            trial.request_stop()

    def _record_epochs(self, trial: TrialRun, ended: Ended | None) -> None:
        """Record the metric of new epochs, and decide after each whether to prune the trial, unless it has ended."""
        recorded = self.study.trial(trial.number).intermediate_values
        total = trial.history.started.epochs if trial.history.started else 0
        for epoch in trial.history.epochs:
            if epoch.epoch in recorded:
                continue
            self.study.report(trial.number, epoch.epoch, self.settings.objective.of_epoch(epoch))
            # Trial 0 is the baseline of the others. They are compared with the trials that have ended, too.
            is_worse = self.study.should_prune(trial.number, total)
            may_prune = trial.number > 0 and ended is None and epoch.epoch < total and not self._is_pruned(trial)
            if is_worse and may_prune:
                self.study.set_attribute(trial.number, PRUNED_AT, epoch.epoch)

    def _record_end(self, trial: TrialRun, ended: Ended) -> None:
        """Record the result of a trial whose run has ended, or start the run again."""
        number = trial.number
        pruned_at = self.study.trial(number).user_attrs.get(PRUNED_AT)
        if ended is Ended.FINISHED:
            self._complete(trial)
        elif ended is Ended.FAILED:
            self._fail(trial, trial.reason(ended))
        elif pruned_at is not None:
            self.study.prune(number, Problem("", f"pruned after epoch {pruned_at}", code="stopped"))
            self._has_result = True
            self.emit(f"trial {number} pruned after epoch {pruned_at}: {self._value_text(number)}")
        elif self._stopping:
            self.emit(f"trial {number} {ended}; it goes on with the sweep")
        elif ended is Ended.STOPPED_BY_USER:
            self.study.prune(number, Problem("", "stopped by a user", code="stopped"))
            self.emit(f"trial {number} was stopped by a user: {self._value_text(number)}")
        elif ended is Ended.REFUSED and not trial.may_be_starting:
            self._fail(trial, trial.reason(ended))
        elif self._may_restart(trial, ended):
            trial.may_be_starting = False
            self._start(trial)
            return
        del self._active[number]
        trial.release()

    def _may_restart(self, trial: TrialRun, ended: Ended) -> bool:
        """Count a crash; after `MAX_CRASHES` without a new epoch, the trial has failed."""
        if ended is Ended.REFUSED:
            return True
        epochs = len(trial.history.epochs)
        before = self.study.trial(trial.number).user_attrs.get(CRASHES, {})
        count = 1 + (before.get("count", 0) if before.get("epochs") == epochs else 0)
        self.study.set_attribute(trial.number, CRASHES, {"count": count, "epochs": epochs})
        if count < MAX_CRASHES:
            self.emit(f"trial {trial.number} {ended}; it starts again")
            return True
        self._fail(trial, Problem("", f"{ended} {count} times without a new epoch", code="run-failed"))
        return False

    def _complete(self, trial: TrialRun) -> None:
        value = result_of(trial.history, self.settings.objective)
        if value is None:
            self._fail(trial, Problem("", f"no epoch has a finite {self.settings.objective.key}", code="non-finite"))
            return
        previous = self._best()
        self.study.complete(trial.number, value)
        self._has_result = True
        best = self._best()
        note = ""
        if best is not None:
            note = f" (best so far {shown(best.value)}, trial {best.number})"
            if previous is None or previous.number != best.number:
                self._write_best(best)
        self.emit(f"trial {trial.number} finished: {self.settings.objective.key} {shown(value)}{note}")

    def _fail(self, trial: TrialRun, reason: Problem) -> None:
        self.study.fail(trial.number, reason)
        self._failures.append(reason)
        self.emit(f"trial {trial.number} failed: {reason}")
        if not self._has_result and len(self._failures) >= MAX_EQUAL_FAILURES and len(set(self._failures)) == 1:
            self.emit(f"the first {len(self._failures)} trials failed for the same reason, so the sweep ends here")
            self._stopping = True

    def _best(self) -> FrozenTrial | None:
        return best_trial(self.study.trials(), self.settings.objective)

    def _value_text(self, number: int) -> str:
        value = self.study.trial(number).value
        return "no epoch has a result" if value is None else f"{self.settings.objective.key} {shown(value)}"

    def _write_best(self, best: FrozenTrial) -> None:
        """Write what the config of the best trial changes, without the devices that only the sweep has chosen."""
        overrides = [] if best.user_attrs.get(PRESET) else overrides_of(best.params)
        config = resolve_config(str(self.folder.config), overrides, trust_code=True).config
        head = f"# Trial {best.number} of {self.folder.name}: {printable(self.settings.objective.key)} {best.value}\n"
        changed = as_stored(without_name(config), only_changed=True)
        text = head + (to_yaml(changed) if changed else "")
        replace_file(self.folder.best, lambda file: file.write(text.encode()))

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
            value = f"{self.settings.objective.key} {shown(best.value)}"
            lines.append(f"best: trial {best.number}, {value}; {best_command(self.folder)}")
        code = ExitCode.FINISHED if self._has_result else ExitCode.FAILED
        if counts["running"] or (self._stopping and len(trials) < self.settings.trials and self._has_result):
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
    """Return the completed trial with the best value, the first of equals; None if there is none."""
    complete = [trial for trial in trials if trial.state.name == "COMPLETE" and trial.value is not None]
    return max(complete, key=lambda trial: (metric.merit(trial.value), -trial.number), default=None)


def best_command(folder: SweepFolder) -> str:
    """Return what trains the best config, as a clause with the command."""
    return f"train it with `gputrain run {folder.best} --name {folder.name}-best`"


def shown(value: Any) -> str:
    """Return a value of a trial in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
