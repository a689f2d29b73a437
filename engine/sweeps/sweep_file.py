"""`sweep.yaml` in the folder of a sweep, the YAML file in which a user describes one, and what a typed line adds to it.

`gputrain sweep` calls `typed_settings`, `start` and `status` read and write the stored file.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from engine.config.yaml_io import read_yaml, to_yaml
from engine.sweeps.settings import (
    DEVICE_KEYS,
    MAX_TRIALS,
    SETTINGS_FORMAT,
    SweepSettings,
    find_objective,
    is_integer,
    split_space,
)
from engine.utils.codec import format_problem
from engine.utils.errors import Problem, UsageError, did_you_mean, raise_if_any
from engine.utils.files import expand_user, is_file, replace_file
from engine.utils.trust import foreign_path_reason


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


def is_sweep_file(path: Path, key: str = "space") -> bool:
    """Whether a YAML file describes a sweep, by its key `space`; a config file has no such section. With the key
    `command`, it describes one of a script."""
    if not is_file(path):
        return False
    try:
        values, _ = read_yaml(path.resolve(), str(path))
    except UsageError:
        return False
    return isinstance(values, dict) and {"space", key} <= values.keys()


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
    pairs = [(str(key), _space_text(value)) for key, value in values.pop("space").items()]
    if isinstance(words := values.get("command"), list):
        values["command"] = shlex.join(map(_scalar_text, words))
    # Every name of a placeholder may have one value: `script` puts it into the command.
    space, fixed = (dict(pairs), dict[str, str]()) if "command" in values else split_space(pairs)
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
            kind, valid = "an integer", is_integer(value)
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
    trust: bool,
) -> tuple[SweepSettings, str | None]:
    """Return the settings that CONFIG, KEY=SPACE, fixed values and `given` fields describe, and the name in a sweep
    file, if any. `words` are those of the command of a script, None without one. `trust` reads a sweep file that
    another user can change. Raises UsageError."""
    pairs = [(key.strip(), value) for key, _, value in (text.partition("=") for text in overrides)]
    settings, name = SweepSettings(), None
    path = expand_user(file) if file is not None else None
    if path is not None and is_sweep_file(path):
        settings, name = read_sweep_file(path, trust_owner=trust)
    elif path is not None:
        settings = replace(settings, config=str(path.absolute()) if is_file(path) else file)
    if words is not None:
        settings = replace(settings, command=shlex.join(words))
    if settings.command and settings.config is not None:
        reason = "is a config beside a command; keep one of them"
        raise UsageError.one(settings.config, reason, code="conflict")
    if settings.command:
        space, fixed = _named_once(pairs), dict(fixed_values)
    else:
        space, fixed = split_space(pairs, fixed_values.items())
    # A key of the command line replaces that of the file, searched or fixed.
    typed = {*space, *fixed}
    space = {key: text for key, text in settings.space.items() if key not in typed} | space
    fixed = {key: text for key, text in settings.fixed.items() if key not in typed} | fixed
    is_grid = given.get("sampler", settings.sampler) == "grid"
    if is_grid and "trials" not in given and settings.trials == SweepSettings().trials:
        given = {**given, "trials": MAX_TRIALS}
    return replace(settings, space=space, fixed=fixed, **given), name


def _named_once(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the values by name. Raises UsageError for names that are given twice."""
    counts = Counter(key for key, _ in pairs)
    raise_if_any([Problem(key, "is given twice; keep one", code="duplicate-key") for key in counts if counts[key] > 1])
    return dict(pairs)
