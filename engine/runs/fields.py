"""Names for what a run list can show, sort and filter by: figures of a row, config keys, labels, and their aliases.

`engine.runs.query` filters and sorts with them, `gputrain runs --columns` and the screen of runs show their values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError, did_you_mean


class Kind(Enum):
    """How the values of a field compare, and how they are shown."""

    TEXT = "text"
    NUMBER = "number"
    SHARE = "share"
    """A number from 0 to 1, shown with four digits."""
    DURATION = "duration"
    """Seconds; a query names them as 90s, 5min, 1h30m or 2d."""
    DATE = "date"
    """Unix seconds; a query names a day, 2026-11-01, or a minute, 2026-11-01T14:30."""
    FLAG = "flag"
    TAGS = "tags"
    CONFIG = "config"
    """A config value: number, text, flag or list."""


@dataclass(frozen=True)
class Field:
    """A named value of a run. `value` returns None if it is unknown.

    `descending` is the direction in which people sort it: the best and the newest first.
    """

    name: str
    kind: Kind
    value: Callable[[RunRow], Any]
    descending: bool = False


def _end_known(read: Callable[[RunRow], float]) -> Callable[[RunRow], float | None]:
    """Return 0, which a row has before the first event, as unknown."""
    return lambda row: read(row) or None


FIGURES: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("name", Kind.TEXT, lambda row: row.name),
        Field("state", Kind.TEXT, lambda row: row.state),
        Field("tags", Kind.TAGS, lambda row: row.tags),
        Field("note", Kind.TEXT, lambda row: row.note),
        Field("archived", Kind.FLAG, lambda row: row.archived),
        Field("epoch", Kind.NUMBER, lambda row: row.epoch, descending=True),
        Field("epochs", Kind.NUMBER, lambda row: row.epochs, descending=True),
        Field("step", Kind.NUMBER, lambda row: row.step, descending=True),
        Field("steps", Kind.NUMBER, lambda row: row.steps, descending=True),
        Field("best_val_accuracy", Kind.SHARE, lambda row: row.best_val_accuracy, descending=True),
        Field("best_epoch", Kind.NUMBER, lambda row: row.best_epoch),
        Field("val_accuracy", Kind.SHARE, lambda row: row.val_accuracy, descending=True),
        Field("val_loss", Kind.SHARE, lambda row: row.val_loss),
        Field("train_loss", Kind.SHARE, lambda row: row.train_loss),
        Field("images_per_second", Kind.NUMBER, lambda row: row.images_per_second, descending=True),
        Field("data_wait", Kind.SHARE, lambda row: row.data_wait, descending=True),
        Field("mfu", Kind.SHARE, lambda row: row.mfu, descending=True),
        Field("grad_norm", Kind.NUMBER, lambda row: row.grad_norm, descending=True),
        Field("age", Kind.DURATION, lambda row: row.age_seconds),
        Field("duration", Kind.DURATION, _end_known(lambda row: row.seconds), descending=True),
        Field("eta", Kind.DURATION, lambda row: row.eta_seconds),
        Field("started", Kind.DATE, lambda row: row.started_at, descending=True),
        Field("updated", Kind.DATE, lambda row: row.updated_at, descending=True),
        Field("gpus", Kind.NUMBER, lambda row: row.gpus, descending=True),
        Field("ranks", Kind.NUMBER, lambda row: row.ranks, descending=True),
        Field("global_batch", Kind.NUMBER, lambda row: row.global_batch, descending=True),
        Field("parameters", Kind.NUMBER, lambda row: row.parameters, descending=True),
        Field("sweep", Kind.TEXT, lambda row: row.sweep or None),
        Field("host", Kind.TEXT, lambda row: row.host or None),
        Field("phase", Kind.TEXT, lambda row: row.phase or None),
        Field("message", Kind.TEXT, lambda row: row.message),
        Field("bottleneck", Kind.TEXT, lambda row: row.bottleneck),
        Field("foreign", Kind.FLAG, lambda row: row.foreign is not None),
        Field("live", Kind.FLAG, lambda row: row.live),
        Field("folder", Kind.TEXT, lambda row: row.folder),
    )
}
ALIASES: Mapping[str, str] = {
    "tag": "tags",
    "accuracy": "best_val_accuracy",
    "acc": "best_val_accuracy",
    "best": "best_val_accuracy",
    "best_accuracy": "best_val_accuracy",
    "loss": "val_loss",
    "images_s": "images_per_second",
    "throughput": "images_per_second",
    "seconds": "duration",
    "time": "duration",
    "run": "name",
    "run.name": "name",
    "model": "model.name",
    "dataset": "data.dataset",
    "data": "data.dataset",
    "lr": "optim.lr",
    "optimizer": "optim.name",
    "optim": "optim.name",
    "batch": "data.batch_size",
    "batch_size": "data.batch_size",
    "seed": "run.seed",
    "scheduler": "schedule.name",
    "schedule": "schedule.name",
    "amp": "precision.amp",
    "precision": "precision.amp",
    "workers": "data.workers",
    "augment": "augment.policy",
}


# Begins the name of one of the user's own metrics, such as metrics.f1.
METRIC_PREFIX = "metrics."


def find_field(name: str) -> Field:
    """Return the field that a name means: a figure, an alias, a config key, or the last part of one config key only.

    Raises UsageError, with the nearest known name.
    """
    wanted = name.casefold()
    wanted = ALIASES.get(wanted.replace("-", "_"), wanted)
    if (figure := FIGURES.get(wanted.replace("-", "_"))) is not None:
        return figure
    if wanted.startswith(METRIC_PREFIX) and wanted != METRIC_PREFIX:
        # Not folded: the name of a metric is the user's.
        return _metric_field(name[len(METRIC_PREFIX) :])
    if wanted in ALIASES.values():
        return _config_field(wanted)
    keys = default_values()
    if wanted in keys:
        return _config_field(wanted)
    # An option of the model or the optimizer: model.options.width.
    section, _, rest = wanted.partition(".")
    parent, _, option = rest.partition(".")
    if option and isinstance(keys.get(f"{section}.{parent}"), dict):
        return _option_field(f"{section}.{parent}", name.split(".", 2)[2])
    matches = [key for key in keys if key.partition(".")[2] == wanted]
    if len(matches) == 1:
        return _config_field(matches[0])
    if matches:
        raise UsageError.one(
            name, f"is part of several config keys: {', '.join(matches)}; write one of them", code="ambiguous-name"
        )
    advice = did_you_mean(wanted, known_names())
    raise UsageError.one(name, f"is no figure of a run and no config key{advice}", code="unknown-key")


def known_names() -> list[str]:
    """Return all names that `find_field` knows: figures, aliases, config keys. Imports the config schema."""
    return [*FIGURES, *ALIASES, *(key for key in default_values() if key not in ALIASES)]


def value_of(row: RunRow, name: str) -> Any:
    """Return the value of a run by name; None if it is unknown. Raises UsageError as `find_field` does."""
    return find_field(name).value(row)


def _config_field(key: str) -> Field:
    def value(row: RunRow) -> Any:
        if not row.config_known:
            return None
        found = row.config[key] if key in row.config else default_values()[key]
        return "none" if found is None else found

    return Field(key, Kind.CONFIG, value)


def _metric_field(metric: str) -> Field:
    """Return the field of one of the user's own metrics, of the last epoch."""
    return Field(f"{METRIC_PREFIX}{metric}", Kind.SHARE, lambda row: row.metrics.get(metric), descending=True)


def _option_field(key: str, option: str) -> Field:
    def value(row: RunRow) -> Any:
        options = row.config.get(key)
        return options.get(option) if isinstance(options, dict) else None

    return Field(f"{key}.{option}", Kind.CONFIG, value)


def as_text(value: Any) -> str:
    """Return a value as a query compares it: as on the command line, and a list with commas."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    if isinstance(value, dict):
        return ",".join(f"{key}={as_text(item)}" for key, item in value.items())
    return str(value)


def date_text(seconds: float) -> str:
    """Return Unix seconds as a local minute, as queries take it; "" for a time that no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""
