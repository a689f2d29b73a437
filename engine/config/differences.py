"""Compare stored configs: the value of every key, the keys that differ, and the keys that change no result.

`engine.runs.comparison` compares runs with it. `engine.config.resume` compares a config with that of a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.optimizer_options import default_options
from engine.config.schema import UNSTORED_KEYS, Config, as_dict
from engine.config.section import has_too_many_values

# They name a session of a run, not what it trains.
SESSION_KEYS = {"run.name", "run.resume", *UNSTORED_KEYS}
SEED_KEY = "run.seed"
PATH_KEYS = {"run.code", "data.path", "data.val_path", "model.weights"}
# Keys that change where, how fast or how safely a run trains, but not what it learns, except for rounding. Which GPUs
# and how many ranks a run has had is in its journal, and `engine.runs.comparison` compares their number.
NEUTRAL_SECTIONS = {"checkpoint", "notify", "queue"}
NEUTRAL_KEYS = SESSION_KEYS | {
    "eval.metrics",
    *(
        "run.log_every",
        "run.watchdog",
        "run.max_restarts",
        "run.requeue",
        "run.snapshot",
        "data.download",
        "data.archive",
        "data.checksum",
        "data.workers",
        "data.worker_type",
    ),
    *("data.prefetch", "device.gpus", "device.wait", "device.ranks", "device.launcher", "device.start_method"),
    *("device.deterministic", "device.cudnn_benchmark", "device.timeout", "device.backend", "device.init_method"),
    *("device.bucket_view", "device.bucket_cap_mb", "device.static_graph", "device.empty_cache", "device.threads"),
}
# Keys whose default is that of the optimizer.
OPTIMIZER_DEFAULT_KEYS = {"optim.momentum", "optim.nesterov", "optim.betas", "optim.eps"}
# The last word of a parameter of another program that names a run or a place.
_PLACE_WORD = re.compile(
    r"(^|[._/-])(dir|directory|folder|path|file|(run|experiment|project|exp)_?name)$", re.IGNORECASE
)
TOO_LARGE = "…"
"""Stands for a value that is too large or too deep to compare; a few lines of YAML aliases expand to any size."""


@dataclass(frozen=True)
class KeyDifference:
    """A config key in which configs differ, and its value in each of them; None also where a config is unknown."""

    key: str
    values: tuple[Any, ...]


def flat_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every `section.key` of the schema, as JSON values; a key that is not stored has its default.

    Keys that the schema does not know are left out.
    """
    values: dict[str, Any] = {}
    for section, defaults in as_dict(Config()).items():
        part = stored.get(section)
        for name, default in defaults.items():
            value = part.get(name, default) if isinstance(part, Mapping) else default
            values[f"{section}.{name}"] = _json_value(value)
    return values


def differing_keys(configs: Sequence[Mapping[str, Any] | None]) -> list[KeyDifference]:
    """Return the keys in which the flat configs differ, in schema order. None is an unknown config, which never
    differs; two spellings of one path are equal."""
    known = [config for config in configs if config is not None]
    differences = []
    for key in known[0] if known else ():
        if key in SESSION_KEYS:
            continue
        # What only follows from different optimizers is no difference of its own.
        if key in OPTIMIZER_DEFAULT_KEYS and all(config.get(key) is None for config in known):
            continue
        first = _compared(key, known[0])
        if any(_compared(key, config) != first for config in known[1:]):
            values = tuple(None if config is None else _resolved(key, config) for config in configs)
            differences.append(KeyDifference(key, values))
    return differences


def seed_group_key(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for configs that differ in `run.seed` and in keys that change no result only."""
    kept = {key: _compared(key, config) for key in config if key != SEED_KEY and not is_neutral(key)}
    return json.dumps(kept, sort_keys=True)


def is_neutral(key: str) -> bool:
    """Whether a key does not change what a run learns."""
    return key in NEUTRAL_KEYS or key.partition(".")[0] in NEUTRAL_SECTIONS


def changes_results(difference: KeyDifference) -> bool:
    """Whether what runs learn can depend on a key in which they differ. Names and places of files are no result."""
    key = difference.key
    if is_neutral(key) or _PLACE_WORD.search(key) or key == "run.code":
        return False
    return not all(
        value is None or (isinstance(value, str) and Path(value).is_absolute()) for value in difference.values
    )


def _compared(key: str, config: Mapping[str, Any]) -> Any:
    value = _resolved(key, config)
    return os.path.realpath(value) if key in PATH_KEYS and isinstance(value, str) else value


def _resolved(key: str, config: Mapping[str, Any]) -> Any:
    """Return the value of a key; null stands for the default of the optimizer."""
    value = config.get(key)
    if value is None and key in OPTIMIZER_DEFAULT_KEYS and isinstance(name := config.get("optim.name"), str):
        return _json_value(default_options(name).get(key.partition(".")[2]))
    return value


def _json_value(value: Any) -> Any:
    """Return a YAML value as JSON; dates and numbers that JSON does not have become text."""
    if has_too_many_values(value):
        return TOO_LARGE
    try:
        return json.loads(json.dumps(value, default=str), parse_constant=str)
    except (ValueError, TypeError, RecursionError):
        return TOO_LARGE
