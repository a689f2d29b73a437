"""One trial of a sweep as a run: start its command, follow it, stop it, and say how it ended and with which result.

The command is `gputrain run --resume --name NAME-007`, which begins the run, continues it or has nothing to do; of a
script, it starts an interrupted one again. It can therefore be started again after a crash at any moment; the lock of
the run folder keeps two of them apart.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from engine.base.codec import finite
from engine.base.errors import Problem, UsageError
from engine.base.exit_codes import CommandExit, ExitCode
from engine.base.text import list_names, printable
from engine.config.schema import Config
from engine.jobs.command.environment import environment_options, run_options
from engine.jobs.command.metric_files import metric_key
from engine.jobs.command.run_metrics import MetricsFinder
from engine.jobs.launch.detached import LaunchedRun, start_detached
from engine.jobs.launch.survivors import stop_survivors
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.plan import SweepPlan, fill_command, trial_overrides
from engine.jobs.sweeps.space import Value, overrides_of
from engine.runs.claim import read_claim
from engine.runs.control import send_request
from engine.runs.curves import SELECTION_KEYS, CurveReader
from engine.runs.events import ControlEvent, RunFinished
from engine.runs.folder import RunFolder, RunState
from engine.runs.foreign_record import by_importance
from engine.runs.history import History
from engine.runs.journal import JournalReader
from engine.runs.metrics import Metric, find_key, registry_keys
from engine.watch.reading import EPOCH_NAMES

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

REQUEST_INTERVAL_SECONDS = 5.0
MAX_REASON_CHARACTERS = 500
# What is read of a run at once, and for how long after its end.
MAX_POLL_SECONDS, MAX_LAST_SECONDS = 0.2, 10.0
MAX_SHOWN_NAMES = 8
# Optuna's journal gets a line for each value: 1,000 for a million steps.
STEP_GROWTH = 1.01
_NO_MATCH = 9
# What a trial of a sweep reports by itself: forty trials would send forty messages about their ends.
TRIAL_OCCASIONS = ("crashed", "stalled", "slowed")


class TrialEnd(StrEnum):
    """How a session of a trial ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """On request of a controller: it can go on."""
    STOPPED_BY_USER = "stopped by a user"
    CRASHED = "crashed"
    """Without a result, or before it began."""
    REFUSED = "refused"
    """The command refused the config."""


class Trial:
    """One trial, a training of the sweep's config. `is_recovered` means that an earlier controller may have started its
    run just before it was killed."""

    refusals: ClassVar[Sequence[int]] = (ExitCode.USAGE_ERROR, ExitCode.FAILED)
    """Exit codes of a command that refuses to run."""

    def __init__(self, sweep: SweepFolder, plan: SweepPlan, number: int, *, is_recovered: bool = False) -> None:
        self.plan, self.number, self.is_recovered = plan, number, is_recovered
        self.folder = sweep.trial(number)
        self._sweep = sweep
        self._process: LaunchedRun | None = None
        self._earlier_end: RunFinished | None = None
        """How the session before the one of the process ended."""
        self._begin()

    def _begin(self) -> None:
        """Begin to read the journal. A refused start deletes the folder with its journal again."""
        self.history, self._reader = History(), JournalReader(self.folder.journal)
        self._stop_requested, self._stopped_by_signal, self._requested_at = False, False, -math.inf

    def line(self, params: Mapping[str, Value], device: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return what `gputrain run` gets for these values and overrides of section `device`: its arguments, and the
        words of a command."""
        overrides = [*trial_overrides(self.plan.settings, params), *overrides_of(device)]
        return [str(self._sweep.config), *overrides, trial_override(self.plan.config)], []

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment of the trial."""
        return os.environ

    def clean_up(self) -> None:
        """End what an earlier start of a command has left behind: ranks end with their supervisor."""
        return

    def values(self, *, to_end: bool) -> Mapping[int, float | None]:
        """Return the metric at the epochs or steps so far, None where it is not finite."""
        objective = self.plan.settings.objective
        return {epoch.epoch: objective.of_epoch(epoch) for epoch in self.history.epochs}

    def length(self, trials: Sequence[FrozenTrial]) -> int:
        """Return the last epoch or step of a whole trial, 0 if it is unknown."""
        return self.history.started.epochs if self.history.started else 0

    def result(self) -> tuple[float, float | None] | Problem:
        """Return the best value of the finished trial and the validation loss of that epoch, None if it is unknown; or
        why it has no result."""
        metric = self.plan.settings.objective
        best = metric.best_of(self.history.epochs)
        value = None if best is None else metric.of_epoch(best)
        if best is None or value is None:
            return Problem("", f"no epoch has a finite {metric.key}", code="non-finite")
        return value, best.selected("loss")

    def start(
        self, command: Sequence[str], flags: Sequence[str], params: Mapping[str, Value], device: Mapping[str, str]
    ) -> None:
        """Start the run with `command`, the beginning of the command line of gputrain. Raises UsageError."""
        self.clean_up()
        self.release()
        root, (arguments, words) = self.folder.path.parent, self.line(params, device)
        line = [*command, "run", "--headless", *arguments, "--name", self.folder.name, "--resume"]
        line += ["--runs-dir", str(root), *flags, *(["--", *words] if words else [])]
        self._begin()
        self._earlier_end = self.folder.history().finished
        self._process = start_detached(line, root, environ=self.environ)

    def release(self) -> None:
        """Close the output of the last command."""
        if self._process is not None:
            self._process.output.close()
            self._process = None

    def poll(self) -> TrialEnd | None:
        """Read new events of the journal; return how the session ended, None while it goes on."""
        # Before the journal, whose last events an owner writes before it releases the run.
        code = self._process.exit_code if self._process is not None else None
        is_live = (self._process is not None and code is None) or self.folder.is_owned()
        for event in self._reader.poll():
            self.history.add(event)
            if isinstance(event, ControlEvent) and event.request == "stop":
                # An administrator or a memory guard means the process, not the trial.
                self._stopped_by_signal = event.by in signal.Signals.__members__
        return None if is_live else self._ended(code)

    def _ended(self, code: int | None) -> TrialEnd:
        finished = self.history.finished
        if self._process is not None and finished == self._earlier_end:
            if code == ExitCode.FINISHED and finished is not None and finished.state == RunState.FINISHED:
                # The run was finished already, so its command had nothing to do.
                return TrialEnd.FINISHED
            return TrialEnd.REFUSED if code in self.refusals else TrialEnd.CRASHED
        if finished is None:
            return TrialEnd.CRASHED
        if finished.state == RunState.STOPPED:
            is_ours = self._stop_requested or self._stopped_by_signal or self._process is None
            return TrialEnd.STOPPED if is_ours else TrialEnd.STOPPED_BY_USER
        return TrialEnd.FINISHED if finished.state == RunState.FINISHED else TrialEnd.FAILED

    def request_stop(self) -> None:
        """Ask the run to stop with a checkpoint; a command that owns no run yet is ended.

        Can be called repeatedly: the request is repeated while the journal does not show it, because a run that resumes
        drops earlier requests.
        """
        now = time.monotonic()
        if self.history.stopping or now - self._requested_at < REQUEST_INTERVAL_SECONDS:
            return
        self._stop_requested, self._requested_at = True, now
        if self.folder.is_owned():
            with suppress(UsageError):
                send_request(self.folder.control, "stop")
        elif self._process is not None and self._process.exit_code is None:
            self._process.process.terminate()

    def kill(self) -> None:
        """Kill the supervisor of the run; its ranks die with it."""
        claim = read_claim(self.folder.owner)
        if self._process is not None:
            self._process.process.kill()
        elif claim is not None and claim.pid is not None and claim.is_process_here:
            with suppress(OSError):
                os.kill(claim.pid, signal.SIGKILL)

    def reason(self, ended: TrialEnd) -> Problem:
        """Return why the trial has no result, as text without the name of its run."""
        text, code = "", ""
        if ended is TrialEnd.REFUSED and self._process is not None:
            lines = self._process.output_lines()
            text = "; ".join(line for line in lines if line.startswith(("error: ", "failed: "))) or "".join(lines[-1:])
        elif ended is TrialEnd.FAILED and self.history.finished is not None:
            text = self.history.finished.message
            code = self.history.failures[-1].code if self.history.failures else ""
        text = printable(text.replace(self.folder.name, "RUN"))[:MAX_REASON_CHARACTERS]
        return Problem("", text or str(ended), code=code or "run-failed")


class MetricReader:
    """Follows one metric of a run. `metric` is its row for `foreign_metric`, under the name that the user typed."""

    def __init__(self, folder: RunFolder, metric: Metric) -> None:
        self._finder, self._metric = MetricsFinder(folder), metric
        self._reader = CurveReader(self._finder.find())
        self.by_step: dict[int, float | None] = {}
        """Values by their steps, None for one that is not finite. Later ones are some steps apart."""

    def poll(self, *, to_end: bool = False) -> float | None:
        """Read what is new, with `to_end` all there is. Return the best finite value, None if there is none."""
        found = self._finder.find()
        if found is not self._reader.run:
            self._reader, self.by_step = CurveReader(found), {}
        deadline = time.monotonic() + (MAX_LAST_SECONDS if to_end else MAX_POLL_SECONDS)
        self._reader.read(lambda: time.monotonic() > deadline)
        curves, wanted = self._reader.curves, self._metric.label
        name = min(curves.names, key=lambda name: (match_rank(wanted, name), name), default="")
        if match_rank(wanted, name) == _NO_MATCH:
            return None
        points, last = curves.over(name, "step").means, max(self.by_step, default=-1)
        is_new = points.x >= max(last + 1, int(last * STEP_GROWTH))
        for step, value in zip(points.x[is_new].astype(int).tolist(), points.y[is_new].tolist(), strict=True):
            if step >= max(last + 1, int(last * STEP_GROWTH)):
                self.by_step[step], last = finite(value), step
        extremes = curves.extremes(name)
        return max(extremes.low, extremes.high, key=self._metric.merit)

    @property
    def found_names(self) -> str:
        """The names of the metrics that the run has, as a text; empty without one."""
        names = by_importance(sorted(name for name in self._reader.curves.names if name.lower() not in EPOCH_NAMES))
        return list_names(names, MAX_SHOWN_NAMES)


@lru_cache(maxsize=4096)
def match_rank(wanted: str, name: str) -> int:
    """Return how well the name of a metric in a run fits the wanted one, 0 for the same name.

    `wanted` may also be the key or the label in the registry of metrics: `val_accuracy` and `val acc` are `val/acc`.
    """
    if name == wanted:
        return 0
    if metric_key(name) == metric_key(wanted):
        return 1
    key, wanted_key = registry_keys([name]).get(name), find_key(wanted) or ""
    return 2 if key is not None and key == SELECTION_KEYS.get(wanted_key, wanted_key) else _NO_MATCH


class ScriptTrial(Trial):
    """The command of a script."""

    refusals = tuple(CommandExit)

    def __init__(self, sweep: SweepFolder, plan: SweepPlan, number: int, *, is_recovered: bool = False) -> None:
        super().__init__(sweep, plan, number, is_recovered=is_recovered)
        assert plan.command is not None  # noqa: S101 - see `make_trial`
        self._command = plan.command
        self._metric = MetricReader(self.folder, plan.settings.objective)

    def line(self, params: Mapping[str, Value], device: Mapping[str, str]) -> tuple[list[str], list[str]]:
        command = fill_command(self._command, params)
        overrides = overrides_of({**self.plan.settings.fixed, **device})
        options = [*run_options(command), *environment_options(command)]
        return [*overrides, trial_override(self.plan.config), "--cwd", command.cwd, *options], [*command.argv]

    @property
    def environ(self) -> Mapping[str, str]:
        return self._command.environment

    def clean_up(self) -> None:
        stop_survivors(self.folder)

    def values(self, *, to_end: bool) -> Mapping[int, float | None]:
        self._metric.poll(to_end=to_end)
        return self._metric.by_step

    def length(self, trials: Sequence[FrozenTrial]) -> int:
        # The length of the first trial that ended: with rungs that move, values of different steps would be compared.
        ends = [
            (each.datetime_complete, each.last_step or 0)
            for each in trials
            if each.state.name == "COMPLETE" and each.datetime_complete is not None
        ]
        return min(ends)[1] if ends else 0

    def result(self) -> tuple[float, float | None] | Problem:
        name, best = self.plan.settings.metric_name, self._metric.poll(to_end=True)
        if best is not None:
            return best, None
        if self._metric.by_step:
            return Problem("", f"no value of {name} is finite", code="non-finite")
        found = f"found: {self._metric.found_names}" if self._metric.found_names else "found no metric"
        advice = ""
        if self.plan.settings.parallel > 1 and not self._command.metrics:
            # See `engine.jobs.command.rivals`.
            advice = "files that parallel trials share are not read; --metrics logs/{run} names those of each"
        return Problem("", f"wrote no {name}; {found}", advice, code="no-metric")


def trial_override(config: Config) -> str:
    """Return the override that restricts the messages of a trial."""
    return f"notify.when=[{','.join(item for item in config.notify.when if item in TRIAL_OCCASIONS)}]"


def make_trial(sweep: SweepFolder, plan: SweepPlan, number: int, *, is_recovered: bool = False) -> Trial:
    """Return a trial of a script if the sweep has a command, else of a training."""
    kind = Trial if plan.command is None else ScriptTrial
    return kind(sweep, plan, number, is_recovered=is_recovered)
