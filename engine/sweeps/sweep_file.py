"""`sweep.yaml` in the folder of a sweep, and the settings that a typed line describes.

`gputrain sweep` calls `typed_settings`, `start` and `status` read and write the stored file.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

from engine.config.yaml_io import read_yaml, to_yaml
from engine.sweeps import Pruner, Sampler
from engine.sweeps.settings import (
    DEVICE_KEYS,
    MAX_TRIALS,
    SETTINGS_FORMAT,
    SweepSettings,
    find_objective,
    split_space,
)
from engine.utils.codec import format_problem
from engine.utils.errors import Problem, UsageError, raise_if_any
from engine.utils.files import expand_user, is_file, replace_file

CHOICES: Mapping[str, tuple[str, ...]] = {"sampler": get_args(Sampler), "pruner": get_args(Pruner)}


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
    # Sweeps of scripts are younger than the format.
    values.setdefault("command", "")
    known = [part.name for part in fields(SweepSettings)]
    if missing := [name for name in known if name not in values]:
        # The defaults of another version would search something else.
        raise UsageError.one(str(path), f"is damaged: it lacks {', '.join(missing)}", code="damaged")
    settings = _from_values(path, {key: values[key] for key in known})
    if find_objective(settings.metric) is None:
        raise UsageError.one(str(path), f"is damaged: {settings.metric!r} is no metric of an epoch", code="damaged")
    return settings


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
            kind, valid = "an integer", isinstance(value, int) and not isinstance(value, bool)
        elif key in CHOICES:
            kind, valid = f"one of {', '.join(CHOICES[key])}", value in CHOICES[key]
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
    words: Sequence[str] | None = None,
) -> SweepSettings:
    """Return the settings that CONFIG, KEY=SPACE, fixed values and `given` fields describe. `words` are those of the
    command of a script, None without one. Raises UsageError."""
    pairs = [(key.strip(), value) for key, _, value in (text.partition("=") for text in overrides)]
    config = str(path.absolute()) if file is not None and is_file(path := expand_user(file)) else file
    if words is not None and config is not None:
        raise UsageError.one(config, "is a config beside a command; keep one of them", code="conflict")
    if words is not None:
        space, fixed = _named_once(pairs), dict(fixed_values)
    else:
        space, fixed = split_space(pairs, fixed_values.items())
    if given.get("sampler") == "grid" and "trials" not in given:
        given = {**given, "trials": MAX_TRIALS}
    command = "" if words is None else shlex.join(words)
    return replace(SweepSettings(), config=config, command=command, space=space, fixed=fixed, **given)


def _named_once(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the values by name. Raises UsageError for names that are given twice."""
    counts = Counter(key for key, _ in pairs)
    raise_if_any([Problem(key, "is given twice; keep one", code="duplicate-key") for key in counts if counts[key] > 1])
    return dict(pairs)
