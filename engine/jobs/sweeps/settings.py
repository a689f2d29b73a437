"""The settings of a sweep, what it searches and how: as they are typed, and as `sweep.yaml` in its folder.

`plan` validates them against the config and this host.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from engine.base import codec
from engine.base.codec import ENTRIES, FORMAT, FileRecord, InvalidRecordError, Meta, field, format_problem
from engine.base.errors import Problem, UsageError, collect_problems, did_you_mean, raise_if_any
from engine.base.files import expand_user, is_file, replace_file
from engine.config.limits import limit_text, read_limits
from engine.config.resume import PATH_KEYS
from engine.config.tasks import TASK_FACTS
from engine.config.yaml_io import read_yaml, to_yaml
from engine.jobs.sweeps import MAX_PARALLEL, MAX_SEED, MAX_TRIALS, Pruner, Sampler
from engine.jobs.sweeps.space import Space, parse_space, split_choices
from engine.runs.keys import parse_key, parse_metric_name, quote_key
from engine.runs.metric_directions import DIRECTIONS
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better, Metric, foreign_metric, own_metric, registry_keys

# These name or continue a single run, or belong to the user and not to a run.
RESERVED_KEYS = ("run.name", "run.resume", "run.requeue", "run.code_packages")
MONITORED = "best"
"""The metric of a sweep that follows `run.monitor`, until it is planned."""
METRICS_OF_MONITORS = {"accuracy": "best_val_accuracy", "loss": "best_val_loss", "top5": "val_top5"}
"""Keys of the metrics that `run.monitor` names otherwise than by `metrics.NAME`."""
DeviceKey = Literal["device.gpus", "device.wait", "device.threads"]
"""The overrides that only the trials have."""


class SweepSettings(FileRecord, frozen=True, kw_only=True):
    """What a sweep searches and how; the content of `sweep.yaml`."""

    config: str | None = None
    """The config file or preset as typed, None for the defaults."""
    space: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """The SPACE of each config key, or of each placeholder in the command of a script (`engine.jobs.sweeps.space`)."""
    fixed: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """The values of other config keys."""
    trials: Annotated[int, Meta(ge=1, le=MAX_TRIALS)] = 40
    parallel: Annotated[int, Meta(ge=1, le=MAX_PARALLEL)] = 1
    sampler: Sampler = "tpe"
    pruner: Pruner = "median"
    metric: str = "best_val_accuracy"
    """A metric of the registry, or one of the user's own with its direction: `metrics.NAME=low`."""
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    """That of the sampler."""
    device: Annotated[dict[DeviceKey, str], ENTRIES] = field(default_factory=dict)
    command: str = ""
    """The command of each trial as a line of a shell, without secrets, and empty for trainings."""

    @property
    def objective(self) -> Metric:
        """The metric whose best value over the epochs or steps is the result of a trial. Raises KeyError."""
        rest, _, word = self.metric.rpartition("=")
        key = parse_key(rest if word in DIRECTIONS else self.metric)
        if not key.startswith(METRIC_PREFIX):
            return METRICS[key]
        # A metric of a script can be anything, so it has digits for a number of any size.
        make = foreign_metric if self.command else own_metric
        return make(key.removeprefix(METRIC_PREFIX), better=DIRECTIONS.get(word))

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
        parsed, problems = dict[str, Space](), list[Problem]()
        for key, text in self.space.items():
            with collect_problems(problems):
                space = parse_space(key, text, integers=False if self.command else None)
                if space is not None:
                    parsed[key] = space
        raise_if_any(problems)
        return parsed

    def check(self) -> tuple[dict[str, Space], list[Problem]]:
        """Return the spaces, and the problems that do not depend on the config."""
        problems, spaces = list[Problem](), dict[str, Space]()
        with collect_problems(problems):
            runs = read_limits().runs
            if runs is not None and self.parallel > runs:
                reason = f"{self.parallel} trials at the same time are too many: {limit_text('runs', runs)}"
                raise UsageError.one("--parallel", reason, "raise the limit there", code="over-limit")
        with collect_problems(problems):
            spaces = self.spaces()
            if not spaces:
                names = ("lr", "opt") if self.command else ("optim.lr", "optim.name")
                example = f"give at least one KEY=SPACE, such as {names[0]}=log:1e-3..0.3 or {names[1]}=sgd,adamw"
                raise UsageError.one("", f"there is nothing to search; {example}", code="missing-value")
        return spaces, problems


def read_settings(path: Path) -> SweepSettings:
    """Read the `sweep.yaml` of a sweep's folder. Raises UsageError if it is not valid."""
    values, _ = read_yaml(path, str(path))
    if not isinstance(values, dict):
        raise UsageError.one(str(path), "must map the settings of a sweep to their values", code="wrong-format")
    if (problem := format_problem(values.get("format"), FORMAT)) is not None:
        raise UsageError.one(str(path), problem, "use the version of gputrain that wrote it", code="wrong-version")
    # The defaults of another version would search something else. Sweeps of scripts are younger than the format.
    if missing := [name for name in SweepSettings.__struct_fields__ if name not in values and name != "command"]:
        raise UsageError.one(str(path), f"is damaged: it lacks {', '.join(missing)}", code="damaged")
    try:
        settings = codec.convert(values, SweepSettings)
        _ = settings.objective
    except (InvalidRecordError, KeyError) as error:
        reason = str(error) if isinstance(error, InvalidRecordError) else f"is damaged: {error} is no metric"
        raise UsageError.one(str(path), reason, code="damaged") from error
    return settings


def write_settings(path: Path, settings: SweepSettings) -> None:
    """Write `sweep.yaml`. Raises OSError."""
    text = to_yaml(codec.to_builtins(settings))
    replace_file(path, lambda file: file.write(text.encode()), durable=True)


def typed_settings(
    file: str | None,
    overrides: Sequence[str],
    fixed: Mapping[str, str],
    given: Mapping[str, Any],
    words: Sequence[str] | None = None,
) -> SweepSettings:
    """Return the settings that CONFIG, KEY=SPACE, fixed values and `given` fields describe. `words` are those of the
    command of a script, None without one. Raises UsageError."""
    pairs = [(key.strip(), value) for key, _, value in (text.partition("=") for text in overrides)]
    config = str(path.absolute()) if file is not None and is_file(path := expand_user(file)) else file
    given = {"trials": MAX_TRIALS, **given} if given.get("sampler") == "grid" else given
    if words is None:
        space, fixed_values = split_space(pairs, fixed.items())
        return SweepSettings(config=config, space=space, fixed=fixed_values, **given)
    if config is not None:
        raise UsageError.one(config, "is a config beside a command; keep one of them", code="conflict")
    return SweepSettings(command=shlex.join(words), space=_named_once(pairs), fixed=dict(fixed), **given)


def _named_once(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the values by name. Raises UsageError for a name that is given twice."""
    names = [name for name, _ in pairs]
    doubled = dict.fromkeys(name for name in names if names.count(name) > 1)
    raise_if_any([Problem(name, "is given twice; keep one", code="duplicate-key") for name in doubled])
    return dict(pairs)


def split_space(
    values: Sequence[tuple[str, str]], flags: Iterable[tuple[str, str]] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Split `key=SPACE` arguments into the searched and the fixed keys. `flags` are keys with the value of all trials.

    Raises UsageError with every problem.
    """
    options, problems = dict(flags), list[Problem]()
    space, fixed = dict[str, str](), dict[str, str]()
    for key, text in _named_once([*values, *options.items()]).items():
        with collect_problems(problems):
            if key in RESERVED_KEYS:
                reason = "cannot be set in a sweep: its trials are runs with names of their own"
                raise UsageError.one(key, reason, code="not-supported")
            # A list of GPUs has commas, and so has a path.
            is_single = key == "device.gpus" or (key in options and key in PATH_KEYS)
            if key in PATH_KEYS:
                # The sweep may be continued from another folder.
                text = ",".join(map(_absolute, [text] if is_single else split_choices(text)))
            is_searched = not is_single and parse_space(key, text) is not None
            if is_searched and key in options:
                reason = f"its option sets one value for all trials; write {key}={text} to search these values"
                raise UsageError.one(key, reason, code="invalid-value")
            (space if is_searched else fixed)[key] = text
    raise_if_any(problems)
    return space, fixed


def _absolute(path: str) -> str:
    return path if path in ("", "null", "pretrained") else str(expand_user(path).absolute())


def typed_metric(option: str, text: str, better: Better, *, is_script: bool) -> str:
    """Return the setting `metric` of `--maximize METRIC` or `--minimize METRIC`.

    Raises UsageError if it is no metric of an epoch, or one of the registry that is better in the other direction."""
    if is_script:
        name = parse_metric_name(text)
        known = METRICS.get(name) or METRICS.get(registry_keys([name]).get(name, ""))
    else:
        # As `run.monitor` names them.
        name = METRICS_OF_MONITORS.get(parse_key(text), parse_key(text))
        if any(name in facts.metrics for facts in TASK_FACTS.values()):
            name = METRIC_PREFIX + name
        known = METRICS.get(name)
    is_own = is_script or name.startswith(METRIC_PREFIX)
    if not is_own and (known is None or known.epoch is None or not known.better):
        searched = [row.key for row in METRICS.values() if row.epoch is not None and row.better is better]
        allowed = (*searched, f"{METRIC_PREFIX}NAME")
        reason = f"{text!r} is not allowed: must be one of {', '.join(allowed)}{did_you_mean(text, allowed)}"
        raise UsageError.one(option, reason, code="unknown-value")
    if known is not None and known.better not in (Better.NEITHER, better):
        other = "--minimize" if known.better is Better.LOW else "--maximize"
        reason = f"{known.better} values of {name} are better; use {other} {quote_key(name)}"
        raise UsageError.one(option, reason, code="conflict")
    if not is_own:
        return name
    return f"{quote_key(METRIC_PREFIX + name.removeprefix(METRIC_PREFIX))}={better}"
