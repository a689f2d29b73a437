"""The settings of a sweep: what it searches and how; `sweep.yaml` in its folder, and the YAML that a user writes.

`gputrain sweep` builds them from its arguments, `validate_settings` finds every problem before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from engine.config.resume import PATH_KEYS
from engine.config.yaml_io import read_yaml, to_yaml
from engine.runs.keys import parse_key, quote_key
from engine.runs.metric_directions import DIRECTIONS
from engine.runs.metrics import METRIC_PREFIX, METRICS, NO_METRICS, Better, Metric, own_metric
from engine.sweeps import Pruner, Sampler
from engine.sweeps.space import Range, Space, parse_space, split_choices
from engine.utils.codec import format_problem
from engine.utils.errors import Problem, UsageError, collect_problems, did_you_mean, raise_if_any
from engine.utils.files import expand_user, is_file, replace_file
from engine.utils.trust import foreign_path_reason

SETTINGS_FORMAT = 1
DEFAULT_TRIALS = 40
MAX_TRIALS = 100_000
MAX_PARALLEL = 1024
# These name or continue a single run, or belong to the user and not to a run.
RESERVED_KEYS = ("run.name", "run.resume", "run.requeue", "run.code_packages")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "sampler": get_args(Sampler),
    "pruner": get_args(Pruner),
}
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
    """

    config: str | None = None
    space: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    trials: int = DEFAULT_TRIALS
    parallel: int = 1
    sampler: Sampler = "tpe"
    pruner: Pruner = "asha"
    metric: str = "best_val_accuracy"
    seed: int = 0
    device: Mapping[str, str] = field(default_factory=dict)

    @property
    def objective(self) -> Metric:
        """The metric whose best value over the epochs is the result of a trial. Raises ValueError if there is none."""
        metric = find_objective(self.metric)
        if metric is None:
            raise ValueError(f"{self.metric} is no metric of an epoch")
        return metric

    def spaces(self) -> dict[str, Space]:
        """Return the parsed space of each searched key. Raises UsageError with every problem."""
        parsed: dict[str, Space] = {}
        problems: list[Problem] = []
        for key, text in self.space.items():
            with collect_problems(problems):
                space = parse_space(key, text)
                if space is None:
                    raise UsageError.one(
                        key, f"{text!r} is a single value, which leaves nothing to search", code="invalid-value"
                    )
                parsed[key] = space
        raise_if_any(problems)
        return parsed

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
        if not _is_integer(value) or not 1 <= value <= maximum:
            problems.append(
                Problem(f"--{name}", f"must be an integer from 1 to {maximum:,}, not {value!r}", code="out-of-range")
            )
    if not _is_integer(settings.seed) or not 0 <= settings.seed < 2**32:
        problems.append(
            Problem(
                "--sampler-seed",
                f"must be an integer from 0 to {2**32 - 1}, not {settings.seed!r}",
                code="out-of-range",
            )
        )
    if find_objective(settings.metric) is None:
        problems.append(_unknown_metric("metric", settings.metric, (*objective_keys(), f"{METRIC_PREFIX}NAME")))
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            problems.append(
                Problem(
                    f"--{name}",
                    f"{value!r} is not allowed: must be one of {', '.join(choices)}{hint}",
                    code="unknown-value",
                )
            )
    if not settings.space:
        example = "give at least one KEY=SPACE, such as optim.lr=log:1e-3..0.3 or optim.name=sgd,adamw"
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


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_stored(settings: SweepSettings) -> str:
    """Return the content of `sweep.yaml`."""
    values = {"format": SETTINGS_FORMAT, **asdict(settings)}
    return to_yaml({key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()})


def write_settings(path: Path, settings: SweepSettings) -> None:
    """Write `sweep.yaml`. Raises OSError."""
    replace_file(path, lambda file: file.write(to_stored(settings).encode()), durable=True)


def read_settings(path: Path) -> SweepSettings:
    """Read the `sweep.yaml` of a sweep's folder. Raises UsageError if it is not valid."""
    values = _read_mapping(path)
    if (problem := format_problem(values.get("format"), SETTINGS_FORMAT)) is not None:
        raise UsageError.one(str(path), problem, "use the version of gputrain that wrote it", code="wrong-version")
    known = [part.name for part in fields(SweepSettings)]
    if missing := [name for name in known if name not in values]:
        # The defaults of another version would search something else.
        raise UsageError.one(str(path), f"is damaged: it lacks {', '.join(missing)}", code="damaged")
    settings = _from_values(path, {key: values[key] for key in known})
    if find_objective(settings.metric) is None:
        raise UsageError.one(str(path), f"is damaged: {settings.metric!r} is no metric of an epoch", code="damaged")
    return settings


def is_sweep_file(path: Path) -> bool:
    """Whether a YAML file describes a sweep, by its key `space`; a config file has no such section."""
    if not is_file(path):
        return False
    try:
        values, _ = read_yaml(path.resolve(), str(path))
    except UsageError:
        return False
    return isinstance(values, dict) and "space" in values


def read_sweep_file(path: Path, *, trust_owner: bool = False) -> tuple[SweepSettings, str | None]:
    """Read the YAML file in which a user describes a sweep. Returns the settings and the name of the sweep, if any.

    Its values count as typed on the command line, so it must not be a file that others can change. `config` is relative
    to the file. Raises UsageError.
    """
    try:
        foreign = foreign_path_reason(path)
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be read: {error.strerror}", code="not-readable") from error
    if foreign is not None and not trust_owner:
        advice = "copy it, or use it anyway with --trust-owner"
        raise UsageError.one(str(path), foreign, advice, code="foreign-writable")
    values = _read_mapping(path.resolve())
    name, gpus = values.pop("name", None), values.pop("gpus", None)
    known = {part.name for part in fields(SweepSettings)} - {"fixed", "device"}
    problems = [
        Problem(
            str(key),
            f"is no setting of a sweep{did_you_mean(str(key), (*known, 'name', 'gpus'))}",
            source=str(path),
            code="unknown-key",
        )
        for key in values
        if key not in known
    ]
    if not isinstance(name, str | None):
        problems.append(Problem("name", "must be text", source=str(path), code="invalid-value"))
    if not isinstance(values.get("space"), dict):
        problems.append(
            Problem("space", "must map config keys to their values", source=str(path), code="invalid-value")
        )
    raise_if_any(problems)
    space, fixed = split_space((str(key), _space_text(value)) for key, value in values.pop("space").items())
    if gpus is not None:
        fixed["device.gpus"] = str(gpus)
    settings = replace(_from_values(path, values), space=space, fixed=fixed)
    if settings.config is not None and is_file(path.parent / expand_user(settings.config)):
        settings = replace(settings, config=str(path.parent / expand_user(settings.config)))
    return settings, name


def _space_text(value: Any) -> str:
    """Return a SPACE in YAML as it is typed: a list holds the choices."""
    if isinstance(value, list):
        return ",".join(_scalar_text(part) for part in value)
    return _scalar_text(value)


def _scalar_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def _from_values(path: Path, values: Mapping[str, Any]) -> SweepSettings:
    """Raises UsageError if a value has another type than its setting."""
    problems: list[Problem] = []
    for key, value in values.items():
        kind = "text"
        if key in ("space", "fixed", "device"):
            keys = ", ".join(sorted(DEVICE_KEYS)) if key == "device" else "config keys"
            kind = f"a mapping of {keys} to text"
            valid = isinstance(value, dict) and all(isinstance(part, str) for part in (*value, *value.values()))
            # They become arguments of the trials without a check of their own.
            valid = valid and (key != "device" or DEVICE_KEYS.issuperset(value))
        elif key == "config":
            valid = isinstance(value, str | None)
        elif key in ("trials", "parallel", "seed"):
            kind, valid = "an integer", _is_integer(value)
        else:
            valid = isinstance(value, str)
        if not valid:
            problems.append(
                Problem(key, f"{value!r} is not allowed: must be {kind}", source=str(path), code="invalid-value")
            )
    raise_if_any(problems)
    return SweepSettings(**values)


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises UsageError."""
    values, _ = read_yaml(path, str(path))
    if not isinstance(values, dict):
        raise UsageError.one(str(path), "must map the settings of a sweep to their values", code="wrong-format")
    return values


def typed_settings(
    file: str | None,
    overrides: Sequence[str],
    fixed_values: Mapping[str, str],
    given: Mapping[str, Any],
    *,
    trust: bool,
) -> tuple[SweepSettings, str | None]:
    """Return the settings that CONFIG, KEY=SPACE, fixed values and `given` fields describe, and the name in a sweep
    file, if any. `trust` reads a sweep file that another user can change. Raises UsageError."""
    pairs = ((key.strip(), value) for key, _, value in (text.partition("=") for text in overrides))
    space, fixed = split_space(pairs, fixed_values.items())
    settings, name = SweepSettings(), None
    path = expand_user(file) if file is not None else None
    if path is not None and is_sweep_file(path):
        settings, name = read_sweep_file(path, trust_owner=trust)
        # A key of the command line replaces that of the file, searched or fixed.
        typed = {*space, *fixed}
        space = {key: text for key, text in settings.space.items() if key not in typed} | space
        fixed = {key: text for key, text in settings.fixed.items() if key not in typed} | fixed
    elif path is not None:
        settings = replace(settings, config=str(path.absolute()) if is_file(path) else file)
    is_grid = given.get("sampler", settings.sampler) == "grid"
    if is_grid and "trials" not in given and settings.trials == SweepSettings().trials:
        given = {**given, "trials": MAX_TRIALS}
    return replace(settings, space=space, fixed=fixed, **given), name
