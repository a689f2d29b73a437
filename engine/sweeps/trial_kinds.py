"""The two kinds of trials: trainings of a config, and the command of a script.

`controller` runs both alike: a `TrialKind` starts a trial, reads its values, and returns its result.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.command.run_options import environment_options, run_options
from engine.command.spec import Command, read_command
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.launch.survivors import stop_survivors
from engine.runs.run_config import default_values, read_changed_config
from engine.sweeps.folder import SweepFolder
from engine.sweeps.messages import trial_override
from engine.sweeps.plan import SweepPlan, divide_gpus, without_name
from engine.sweeps.script import fill_command, trial_line
from engine.sweeps.script_metric import MetricReader
from engine.sweeps.settings import SweepSettings
from engine.sweeps.space import Value, overrides_of
from engine.sweeps.trial_run import TrialResult, TrialRun, result_of
from engine.utils.errors import Problem, UsageError
from engine.utils.exit_codes import CommandExit, ExitCode
from engine.utils.files import replace_file
from engine.utils.host import available_cores
from engine.utils.redaction import redact_argv
from engine.utils.text import printable

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

LONGER_FACTOR = 5
"""How many times the epochs of a trial the best config is trained for, as suggested."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
Values = Sequence[tuple[int, float | None]]
"""Steps or epochs, and the values that the metric had there; None for one that is not finite."""


@dataclass(frozen=True)
class TrialStart:
    """What `gputrain run` gets for a trial: a config and overrides, or the options and words of a command."""

    arguments: Sequence[str]
    words: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    """Environment of the process; None for that of the controller."""


class TrialKind(Protocol):
    """One kind of trials."""

    @property
    def refusals(self) -> Sequence[int]:
        """Exit codes of a trial that was refused."""
        ...

    def start(self, params: Mapping[str, Value], device: Mapping[str, str], *, is_preset: bool) -> TrialStart:
        """Return how to start a trial with these values and overrides of section `device`."""
        ...

    def clean_up(self, trial: TrialRun) -> None:
        """End what a trial has left behind whose supervisor was killed."""
        ...

    def new_values(self, trial: TrialRun, *, has_ended: bool) -> Values:
        """Return values that may not have been recorded yet."""
        ...

    def planned(self, trial: TrialRun, trials: Sequence[FrozenTrial]) -> int:
        """Return the last epoch or step of a whole trial, 0 if it is unknown."""
        ...

    def result(self, trial: TrialRun) -> TrialResult | Problem:
        """Return the result of a finished trial, or why it has none."""
        ...

    def write_best(self, best: FrozenTrial, params: Mapping[str, Value]) -> None:
        """Write what repeats the best trial. Raises OSError."""
        ...


@dataclass(frozen=True)
class ConfigTrials:
    """Trainings of a config."""

    folder: SweepFolder
    plan: SweepPlan
    refusals = (ExitCode.USAGE_ERROR, ExitCode.FAILED)

    def start(self, params: Mapping[str, Value], device: Mapping[str, str], *, is_preset: bool) -> TrialStart:
        overrides = [] if is_preset else overrides_of(self.plan.settings.trial_values(params))
        return TrialStart(
            [str(self.folder.config), *overrides, *overrides_of(device), trial_override(self.plan.config)]
        )

    def clean_up(self, trial: TrialRun) -> None:
        """Ranks end with their supervisor."""

    def new_values(self, trial: TrialRun, *, has_ended: bool) -> Values:
        objective = self.plan.settings.objective
        return [(epoch.epoch, objective.of_epoch(epoch)) for epoch in trial.history.epochs]

    def planned(self, trial: TrialRun, trials: Sequence[FrozenTrial]) -> int:
        return trial.history.started.epochs if trial.history.started else 0

    def result(self, trial: TrialRun) -> TrialResult | Problem:
        metric = self.plan.settings.objective
        result = result_of(trial.history, metric)
        return Problem("", f"no epoch has a finite {metric.key}", code="non-finite") if result is None else result

    def write_best(self, best: FrozenTrial, params: Mapping[str, Value]) -> None:
        """Write what the config of the best trial changes, without the devices that only the sweep has chosen."""
        values = overrides_of(self.plan.settings.trial_values(params))
        config = resolve_config(str(self.folder.config), values, trust_code=True).config
        name = printable(self.plan.settings.metric_name)
        head = f"# Trial {best.number} of {self.folder.name}: {name} {best.value}\n"
        changed = as_stored(without_name(config), only_changed=True)
        text = head + (to_yaml(changed) if changed else "")
        replace_file(self.folder.best, lambda file: file.write(text.encode()))


@dataclass(frozen=True)
class ScriptTrials:
    """The command of a script."""

    plan: SweepPlan
    command: Command
    refusals = tuple(CommandExit)
    _readers: dict[int, MetricReader] = field(default_factory=dict)

    def start(self, params: Mapping[str, Value], device: Mapping[str, str], *, is_preset: bool) -> TrialStart:
        settings, command = self.plan.settings, fill_command(self.command, params)
        overrides = [*overrides_of({**settings.fixed, **device}), trial_override(self.plan.config)]
        environ = dict(command.environment)
        if device["device.gpus"] == "cpu" and settings.parallel > 1:
            # Each of them would start a thread for each core.
            environ.setdefault(THREADS_VARIABLE, str(max(1, available_cores() // settings.parallel)))
        options = [*run_options(command), *environment_options(command)]
        return TrialStart([*overrides, "--cwd", command.cwd, *options], command.argv, environ)

    def clean_up(self, trial: TrialRun) -> None:
        stop_survivors(trial.folder)

    def new_values(self, trial: TrialRun, *, has_ended: bool) -> Values:
        if trial.number not in self._readers:
            self._readers[trial.number] = MetricReader(trial.folder, self.plan.settings.objective)
        return self._readers[trial.number].poll(to_end=has_ended)

    def planned(self, trial: TrialRun, trials: Sequence[FrozenTrial]) -> int:
        # The length of the first trial that ended: with rungs that move, values of different steps would be compared.
        complete = [each for each in trials if each.state.name == "COMPLETE"]
        ends = [
            (each.datetime_complete, each.last_step or 0) for each in complete if each.datetime_complete is not None
        ]
        return min(ends)[1] if ends else 0

    def result(self, trial: TrialRun) -> TrialResult | Problem:
        name, reader = self.plan.settings.metric_name, self._readers[trial.number]
        if reader.best is not None:
            return TrialResult(reader.best)
        if reader.has_values:
            return Problem("", f"no value of {name} is finite", code="non-finite")
        found = f"found: {reader.found_names}" if reader.found_names else "found no metric"
        advice = ""
        if self.plan.settings.parallel > 1 and not self.command.metrics:
            # See `engine.command.rivals`.
            advice = "files that parallel trials share are not read; --metrics logs/{run} names those of each"
        return Problem("", f"wrote no {name}; {found}", advice, code="no-metric")

    def write_best(self, best: FrozenTrial, params: Mapping[str, Value]) -> None:
        """The command line is all that repeats it."""


def kind_of(folder: SweepFolder, plan: SweepPlan) -> TrialKind:
    """Return the kind of the trials of a sweep."""
    return ConfigTrials(folder, plan) if plan.command is None else ScriptTrials(plan, plan.command)


def best_command(folder: SweepFolder, settings: SweepSettings, params: Mapping[str, Value]) -> str:
    """Return what trains the best config or runs the best command again, as a clause with the command.

    Secrets in it are hidden.
    """
    name = f"--name {folder.name}-best"
    if not settings.command:
        config = {**default_values(), **(read_changed_config(folder.config) or {}), **params}
        epochs = int(config["run.epochs"]) * LONGER_FACTOR
        return f"train it longer with `gputrain run {folder.best} --epochs {epochs} {name}`"
    options = list[str]()
    # What else the line shows is in the settings.
    with suppress(UsageError):
        command = fill_command(read_command(folder), params)
        options = [] if Path(command.cwd) == Path.cwd() else ["--cwd", command.cwd]
        options += [*run_options(command), *environment_options(command)]
    gpus = divide_gpus(settings.device["device.gpus"], settings.parallel)[0]
    words = ["gputrain", "run", *name.split(), "--gpus", gpus, *redact_argv(options)]
    return f"run it again with `{shlex.join(words)} -- {trial_line(settings, params)}`"
