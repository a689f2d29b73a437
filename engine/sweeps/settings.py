"""The settings of a sweep: what it searches and how.

`sweep_file` reads and writes them, `script` has what only the sweep of a script has. `check_numbers` finds the problems
that do not depend on the config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from engine.config.limits import read_limits
from engine.config.resume import PATH_KEYS
from engine.runs.keys import parse_key, quote_key
from engine.runs.metric_directions import DIRECTIONS
from engine.runs.metrics import METRIC_PREFIX, METRICS, NO_METRICS, Better, Metric, foreign_metric, own_metric
from engine.sweeps import Pruner, Sampler
from engine.sweeps.space import Range, Space, Value, parse_space, split_choices
from engine.utils.errors import Problem, UsageError, collect_problems, did_you_mean, raise_if_any
from engine.utils.files import expand_user
from engine.utils.text import pluralize

SETTINGS_FORMAT = 1
DEFAULT_TRIALS = 40
MAX_TRIALS = 100_000
MAX_PARALLEL = 1024
# These name or continue a single run, or belong to the user and not to a run.
RESERVED_KEYS = ("run.name", "run.resume", "run.requeue", "run.code_packages")
# The overrides that only the trials have.
DEVICE_KEYS = frozenset({"device.gpus", "device.wait", "device.threads"})
# What another command for the same sweep may change; the rest decides which values are searched.
CHANGEABLE = ("trials", "parallel")


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep searches and how.

    `config` is the config file or preset as typed, None for the defaults. `space` maps config keys to their SPACE as
    typed (`engine.sweeps.space`), `fixed` the other keys to their values. `device` holds the overrides of section
    `device` that only the trials have. `metric` is a text for `find_objective`. `seed` is that of the sampler.

    `command` is the command of each trial as a line of a shell, without secrets, and empty for trainings. Then `space`
    maps the names of its placeholders.
    """

    config: str | None = None
    space: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    trials: int = DEFAULT_TRIALS
    parallel: int = 1
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    metric: str = "best_val_accuracy"
    seed: int = 0
    device: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    @property
    def objective(self) -> Metric:
        """The metric whose best value over the epochs is the result of a trial. Raises ValueError if there is none."""
        metric = find_objective(self.metric)
        if metric is None:
            raise ValueError(f"{self.metric} is no metric of an epoch")
        # A metric of a script can be anything, so it has digits for a number of any size.
        return foreign_metric(metric.label, better=metric.better) if self.command else metric

    @property
    def metric_name(self) -> str:
        """The name of the metric in messages: its key, or what the script calls it."""
        return self.objective.label if self.command else self.objective.key

    @property
    def step_name(self) -> str:
        """What the intermediate values of a trial are counted in."""
        return "step" if self.command else "epoch"

    def spaces(self) -> dict[str, Space]:
        """Return the parsed space of each searched key. Raises UsageError with every problem."""
        parsed: dict[str, Space] = {}
        problems: list[Problem] = []
        for key, text in self.space.items():
            with collect_problems(problems):
                space = parse_space(key, text, integers=False if self.command else None)
                if space is None:
                    raise UsageError.one(
                        key, f"{text!r} is a single value, which leaves nothing to search", code="invalid-value"
                    )
                parsed[key] = space
        raise_if_any(problems)
        return parsed

    def trial_values(self, params: Mapping[str, Value]) -> dict[str, Value]:
        """Return what the command of a trial sets besides the config file: its values, and the typed keys of the
        optimizer, which another optimizer would drop from the file."""
        return {key: text for key, text in self.fixed.items() if key.startswith("optim.")} | dict(params)

    def differences(self, other: SweepSettings) -> list[str]:
        """Return the names of the settings in which two commands for one sweep must not differ, but do."""
        names = [part.name for part in fields(self) if part.name not in (*CHANGEABLE, "device")]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def objective_keys() -> tuple[str, ...]:
    """Return the metrics that a sweep can search the best value of: those that have one in each epoch."""
    return tuple(key for key, metric in METRICS.items() if metric.epoch is not None and metric.better)


def find_objective(text: str, directions: Mapping[str, Better] = NO_METRICS) -> Metric | None:
    """Return one of `objective_keys`, or one of the user's own metrics, `metrics.NAME`; None if it is neither.

    `metrics.NAME=low` says which values are better, else `directions` and then the name. A key may be in quotes.
    """
    rest, _, word = text.rpartition("=")
    key = parse_key(rest if word in DIRECTIONS else text)
    if not key.startswith(METRIC_PREFIX):
        return METRICS[key] if key in objective_keys() and word not in DIRECTIONS else None
    name = key.removeprefix(METRIC_PREFIX)
    return own_metric(name, better=DIRECTIONS.get(word) or directions.get(name)) if name else None


def with_direction(settings: SweepSettings, directions: Mapping[str, Better]) -> SweepSettings:
    """Return settings that name the direction of an own metric, so that a sweep keeps it when the folder changes its
    `directions`."""
    metric = find_objective(settings.metric, directions)
    is_own = metric is not None and metric.key.startswith(METRIC_PREFIX)
    return (
        replace(settings, metric=f"{quote_key(metric.key)}={metric.better}")
        if metric is not None and is_own
        else settings
    )


def metric_in_direction(option: str, text: str, better: Better) -> str:
    """Return the setting `metric` of `--maximize METRIC` or `--minimize METRIC`. Raises UsageError if it is no metric
    of an epoch, or if its values are better in the other direction."""
    rest, _, word = text.rpartition("=")
    key = parse_key(rest if word in DIRECTIONS else text)
    metric = find_objective(key, {key.removeprefix(METRIC_PREFIX): DIRECTIONS.get(word, better)})
    if metric is None:
        known = (*(name for name in objective_keys() if METRICS[name].better is better), f"{METRIC_PREFIX}NAME")
        raise UsageError([_unknown_metric(option, text, known)])
    if metric.better is not better:
        other = "--minimize" if metric.better is Better.LOW else "--maximize"
        reason = f"{metric.better} values of {metric.key} are better; use {other} {quote_key(metric.key)}"
        raise UsageError.one(option, reason, code="conflict")
    return f"{quote_key(key)}={better}" if key.startswith(METRIC_PREFIX) else key


def _unknown_metric(location: str, text: str, known: Sequence[str]) -> Problem:
    reason = f"{text!r} is not allowed: must be one of {', '.join(known)}"
    return Problem(location, reason + did_you_mean(text, known), code="unknown-value")


def split_space(
    values: Iterable[tuple[str, str]], flags: Iterable[tuple[str, str]] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Split `key=SPACE` arguments into the searched and the fixed keys. `flags` are keys with the value of all trials.

    Raises UsageError with every problem.
    """
    space: dict[str, str] = {}
    fixed: dict[str, str] = {}
    problems: list[Problem] = []
    given = [*((key, text, False) for key, text in values), *((key, text, True) for key, text in flags)]
    for key, text, is_flag in given:
        with collect_problems(problems):
            if key in space or key in fixed:
                raise UsageError.one(key, "is given twice; keep one", code="duplicate-key")
            if key in RESERVED_KEYS:
                raise UsageError.one(
                    key, "cannot be set in a sweep: its trials are runs with names of their own", code="not-supported"
                )
            if key in PATH_KEYS:
                # The sweep may be continued from another folder.
                text = _absolute(text) if is_flag else ",".join(map(_absolute, split_choices(text)))
            # A list of GPUs has commas.
            searched = None if key == "device.gpus" or (is_flag and key in PATH_KEYS) else parse_space(key, text)
            if is_flag and searched is not None:
                reason = f"its option sets one value for all trials; write {key}={text} to search these values"
                raise UsageError.one(key, reason, code="invalid-value")
            (fixed if searched is None else space)[key] = text
    raise_if_any(problems)
    return space, fixed


def _absolute(path: str) -> str:
    return path if path in ("", "null", "pretrained") else str(expand_user(path).absolute())


def check_numbers(settings: SweepSettings) -> list[Problem]:
    """Return the problems of the settings that do not depend on the config."""
    problems: list[Problem] = []
    for name, maximum in (("trials", MAX_TRIALS), ("parallel", MAX_PARALLEL)):
        value = getattr(settings, name)
        if not 1 <= value <= maximum:
            problems.append(
                Problem(f"--{name}", f"must be an integer from 1 to {maximum:,}, not {value!r}", code="out-of-range")
            )
    with collect_problems(problems):
        runs = read_limits().runs
        if runs is not None and settings.parallel > runs.value:
            reason = f"{settings.parallel} trials at the same time are too many: {runs}"
            problems.append(Problem("--parallel", reason, "raise the limit there", code="over-limit"))
    if not 0 <= settings.seed < 2**32:
        problems.append(
            Problem(
                "--sampler-seed",
                f"must be an integer from 0 to {2**32 - 1}, not {settings.seed!r}",
                code="out-of-range",
            )
        )
    if find_objective(settings.metric) is None:
        problems.append(_unknown_metric("metric", settings.metric, (*objective_keys(), f"{METRIC_PREFIX}NAME")))
    if not settings.space:
        names = ("lr", "opt") if settings.command else ("optim.lr", "optim.name")
        example = f"give at least one KEY=SPACE, such as {names[0]}=log:1e-3..0.3 or {names[1]}=sgd,adamw"
        problems.append(Problem("", f"there is nothing to search; {example}", code="missing-value"))
    if settings.sampler != "grid":
        problems += [
            Problem(key, "a number of grid points (/N) needs --sampler grid; remove it", code="conflict")
            for key, text in settings.space.items()
            if isinstance(space := _parsed(key, text), Range) and space.points is not None
        ]
    return problems


def _parsed(key: str, text: str) -> Space | None:
    try:
        return parse_space(key, text)
    except UsageError:
        return None


def pruning_warnings(settings: SweepSettings, counts: Mapping[str, int]) -> list[str]:
    """Return the warning about a sweep that pruned most of its trials; `counts` is the number of trials by state."""
    pruned, ended = counts.get("pruned", 0), sum(counts.get(state, 0) for state in ("complete", "pruned", "failed"))
    if pruned * 2 <= ended:
        return []
    advice = f"to run each to its last {settings.step_name}, search again with --pruner none and another name"
    return [f"warning: {pruned} of {pluralize(ended, 'trial')} were pruned, and may have become better; {advice}"]
