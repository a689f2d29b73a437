"""Names for what a run list can show, sort and filter by: metrics, fields of a row, config keys, labels, aliases.

The numbers are those of `engine.runs.metrics`. `engine.runs.query` filters and sorts with the names, `gputrain runs
--columns` and the screen of runs show their values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property, partial
from typing import Any

from engine.base.errors import UsageError, nearest
from engine.base.text import list_names
from engine.runs.folder import RunState
from engine.runs.keys import quote_key
from engine.runs.metrics import (
    BEST_PREFIX,
    METRIC_PREFIX,
    METRICS,
    NO_METRICS,
    SHORT_NAMES,
    Better,
    Metric,
    Unit,
    better_of_name,
    find_key,
    fold_name,
    foreign_metric,
    own_metric,
    own_metrics,
)
from engine.runs.monitor import record_monitor
from engine.runs.run_config import default_values
from engine.runs.run_record import DIVERGED
from engine.runs.run_row import UNKNOWN_STATE, UNREADABLE, RunRow
from engine.watch.activity import Activity


class FieldKind(Enum):
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
    PARAMETER = "parameter"
    """A value that another program was configured with."""


@dataclass(frozen=True)
class Field:
    """A named value of a run. `value` returns None if it is unknown. A number of the record has a `metric`.

    `descending` is the direction in which people sort it: the best and the newest first.
    """

    name: str
    kind: FieldKind
    value: Callable[[RunRow], Any]
    descending: bool = False
    metric: Metric | None = None
    choices: tuple[str, ...] = ()
    """All values that it can have; empty if there is no such list."""
    title: str = ""
    """Its heading in tables if it is not the usual one."""

    @property
    def label(self) -> str:
        """Its heading in tables: that of the metric, else a short name."""
        if self.title:
            return self.title
        return LABELS.get(self.name, _last_part(self.name)) if self.metric is None else self.metric.label

    @property
    def is_text(self) -> bool:
        """Whether its values are words, which a table aligns to the left."""
        if self.kind is FieldKind.CONFIG:
            return isinstance(default_values().get(self.name), str)
        return self.kind in (FieldKind.TEXT, FieldKind.TAGS)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")


# Headings of fields whose names say too little or too much in their last part.
LABELS: Mapping[str, str] = {
    "age": "eta or age", "started_at": "started", "updated_at": "updated", "model.name": "model",
    "optim.name": "optimizer", "schedule.name": "schedule", "data.batch_size": "batch/rank",
}  # fmt: skip

# What lists show in place of a state, which `RunRow.shown_state` chooses.
SHOWN_STATES = (DIVERGED, UNREADABLE)
_HEADINGS = {label.replace(" ", "_"): name for name, label in LABELS.items()}
ROW_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        Field("name", FieldKind.TEXT, lambda row: row.name),
        Field("best", FieldKind.SHARE, lambda row: record_monitor(row.record).of_run(row.record), descending=True),
        Field("state", FieldKind.TEXT, lambda row: row.state, choices=(*RunState, UNKNOWN_STATE, *SHOWN_STATES)),
        Field("tags", FieldKind.TAGS, lambda row: row.tags),
        Field("note", FieldKind.TEXT, lambda row: row.note),
        Field("archived", FieldKind.FLAG, lambda row: row.archived),
        Field("age", FieldKind.DURATION, lambda row: row.age_seconds),
        Field("started_at", FieldKind.DATE, lambda row: row.record.started_at, descending=True),
        Field("updated_at", FieldKind.DATE, lambda row: row.record.updated_at, descending=True),
        Field("sweep", FieldKind.TEXT, lambda row: row.sweep or None),
        Field("host", FieldKind.TEXT, lambda row: row.record.host or None),
        Field("phase", FieldKind.TEXT, lambda row: row.record.phase or None),
        Field("message", FieldKind.TEXT, lambda row: row.message),
        Field("bottleneck", FieldKind.TEXT, lambda row: row.record.bottleneck and row.record.bottleneck.message),
        Field("foreign", FieldKind.FLAG, lambda row: row.foreign is not None),
        Field("diverged", FieldKind.FLAG, lambda row: row.shown_state == DIVERGED),
        Field("live", FieldKind.FLAG, lambda row: row.live),
        Field("folder", FieldKind.TEXT, lambda row: row.folder),
        Field("format", FieldKind.TEXT, lambda row: ", ".join(row.formats) or None),
        Field("command", FieldKind.TEXT, lambda row: row.record.command or None),
        Field("exit_code", FieldKind.NUMBER, lambda row: row.record.exit_code),
    )
}
# Fields of runs of other programs, besides their metrics and parameters.
FOREIGN_FIELDS = ("name", "state", "age", "updated_at", "step", "format", "message", "folder")
# Metrics of the registry that `engine.runs.foreign_record` knows, besides `lr`, which is mostly a parameter.
FOREIGN_METRICS = (
    "val_loss", "best_val_loss", "val_accuracy", "best_val_accuracy", "train_loss", "train_accuracy",
)  # fmt: skip
_FOREIGN_ALIASES = {"run": "name", "updated": "updated_at", "changed": "age", "formats": "format"}
_SYNONYMS = {"lr": "learning_rate", "learning_rate": "lr"}
_BEST = re.compile(r"\Abest[_ ]")
_LAST_PART = re.compile(r"[./]")
_UNKNOWN, _UNKNOWN_KEY = object(), "is no metric of a run and no config key"
COMMAND_PREFIX = "command."
"""Of the names of fields that are parameters of commands, whatever they are called."""
_KINDS = {Unit.SCORE: FieldKind.SHARE, Unit.SHARE: FieldKind.SHARE, Unit.SECONDS: FieldKind.DURATION}
ALIASES: Mapping[str, str] = {
    "tag": "tags",
    **SHORT_NAMES,
    "started": "started_at",
    "updated": "updated_at",
    "run": "name",
    "run.name": "name",
    "model": "model.name",
    "dataset": "data.dataset",
    "data": "data.dataset",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
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


@dataclass(frozen=True)
class Names:
    """What a name can mean in some rows, besides the fields that every run has.

    `metrics` are the names that the runs have for their metrics, with the directions, and `parameters` those of the
    parameters of commands and foreign runs. Foreign runs have parameters in place of config keys.
    """

    metrics: tuple[tuple[str, Better], ...] = ()
    parameters: tuple[str, ...] = ()
    is_foreign: bool = False

    @cached_property
    def directions(self) -> dict[str, Better]:
        """The directions of the metrics by name."""
        return dict(self.metrics)


NO_NAMES = Names()


def names_of(
    rows: Iterable[RunRow], directions: Mapping[str, Better] = NO_METRICS, *, is_foreign: bool = False
) -> Names:
    """Return the names of rows, those of most rows first. `directions` are the stored ones of the user's metrics."""
    rows = list(rows)
    # Commands have names of their own for metrics of the registry, too.
    printed = {name for row in rows if row.record.command for name in row.record.metric_names.values()}
    own = own_metrics((row.record for row in rows), directions)
    metrics = {name: better_of_name(name) for name in sorted(printed)} | own
    counts = Counter(key for row in rows for key in row.record.command_parameters)
    return Names(tuple(metrics.items()), tuple(key for key, _ in counts.most_common()), is_foreign)


def find_field(name: str, names: Names = NO_NAMES) -> Field:
    """Return the field that a name means, in this order: a field or metric of every run, also by its alias or heading;
    `metrics.NAME`, `best_metrics.NAME` and `command.NAME`; a config key, also by its last part; a metric or a parameter
    of the runs; a metric by what other programs call it.

    Foreign runs have few of these fields, and names of theirs go before the others. Raises UsageError, with the nearest
    known name.
    """
    field = _every_field(name, names) or _prefixed_field(name, names)
    if field is None and not names.is_foreign:
        field = _config_key_field(name)
    if field is None:
        key = find_key(name) or ""
        is_known = key in FOREIGN_METRICS or not names.is_foreign
        other = _metric_field(METRICS[key]) if key in METRICS and is_known else None
        field = _named_field(name, names, other) or other
    if field is not None:
        return field
    found = nearest(name.casefold(), known_names(names))
    advice = "" if found is None else f"did you mean {quote_key(found)}?"
    reason = "is no metric and no parameter of these runs" if names.is_foreign else _UNKNOWN_KEY
    raise UsageError.one(name, reason, advice, code="unknown-key")


def _every_field(name: str, names: Names) -> Field | None:
    """Return a field or a metric of every run."""
    folded = fold_name(name)
    if names.is_foreign:
        key = _FOREIGN_ALIASES.get(folded, folded)
        field = _shared_field(key) if key in (*FOREIGN_FIELDS, *FOREIGN_METRICS) else None
        changes: dict[str, Any] = {"state": {"choices": (*Activity, *SHOWN_STATES)}, "age": {"title": "changed"}}
        return field and replace(field, **changes.get(key, {}))
    field = _shared_field(ALIASES.get(folded, _HEADINGS.get(folded, folded)))
    logged = name if name in names.directions else _BEST.sub("", name)
    if (shared := field) is None or logged not in names.directions:
        return field
    of_command = _logged_field(logged, names, shared, best=logged != name)

    def value(row: RunRow) -> Any:
        return of_command.value(row) if row.record.command else shared.value(row)

    # Its heading is the name, because it is not the same metric for all runs.
    return replace(shared, name=name, title=name, value=value)


def _prefixed_field(name: str, names: Names) -> Field | None:
    """Return the field of a name that says what it is. The name of a metric is not folded: it is the user's."""
    for prefix in (METRIC_PREFIX, BEST_PREFIX):
        if name.casefold().startswith(prefix) and len(name) > len(prefix) and name not in names.parameters:
            return _metric_field(_own_row(name[len(prefix) :], names, best=prefix == BEST_PREFIX))
    is_parameter = name.casefold().startswith(COMMAND_PREFIX) and not names.is_foreign
    return _parameter_field(name[len(COMMAND_PREFIX) :], names) if is_parameter and name != COMMAND_PREFIX else None


def _config_key_field(name: str) -> Field | None:
    """Return the field of a config key: by its name, an alias, its last part, or an option of a model or optimizer, as
    `model.options.width`. Raises UsageError for a part of several keys."""
    wanted = ALIASES.get(fold_name(name), _HEADINGS.get(fold_name(name), name.casefold()))
    if wanted in ALIASES.values() and wanted not in METRICS:
        return _config_field(wanted)
    keys, wanted = default_values(), wanted.replace(" ", "_")
    if wanted in keys:
        return _config_field(wanted)
    section, _, rest = wanted.partition(".")
    parent, _, option = rest.partition(".")
    if option and isinstance(keys.get(f"{section}.{parent}"), dict):
        return _option_field(f"{section}.{parent}", name.split(".", 2)[2])
    return _only_one(name, [key for key in keys if key.partition(".")[2] == wanted], "config keys", _config_field)


def _named_field(name: str, names: Names, other: Field | None) -> Field | None:
    """Return the field of a metric or a parameter that the runs call so; `other` is what other runs have for it.

    Of foreign runs, `lr` is also the only one whose last part it is, such as `optimizer.lr`."""
    metrics, parameter = names.directions, partial(_parameter_field, names=names)
    if not names.is_foreign:
        logged = next((each for each in (name, _BEST.sub("", name)) if each in metrics), None)
        if logged is None:
            return parameter(name) if name in names.parameters else None
        if other is None:
            return _metric_field(_own_row(logged, names, best=logged != name))
        return _logged_field(logged, names, other, best=logged != name)
    last = partial(_logged_field, names=names)
    for wanted in (name, _SYNONYMS.get(name.casefold(), name)):
        if wanted in names.parameters:
            return parameter(wanted)
        if wanted in metrics:
            return _metric_field(METRICS["lr"]) if wanted == "lr" else last(wanted)
        if (logged := wanted.removeprefix("best_")) in metrics:
            return _logged_field(logged, names, best=True)
        for known, make in ((names.parameters, parameter), (metrics, last)):
            matches = [key for key in known if _LAST_PART.split(key)[-1].casefold() == wanted.casefold()]
            if (field := _only_one(name, matches, "names", make)) is not None:
                return field
    return None


def _only_one(name: str, matches: Sequence[str], things: str, make: Callable[[str], Field]) -> Field | None:
    """Return the field of the only key that a name is a part of. Raises UsageError if there are several."""
    if len(matches) > 1:
        reason = f"is part of several {things}: {list_names(sorted(matches), 5)}; write one of them"
        raise UsageError.one(name, reason, code="ambiguous-name")
    return make(matches[0]) if matches else None


def field_names() -> list[str]:
    """Return the names of the fields that every run has."""
    return [
        *(name for name in ROW_FIELDS if name != "format"),
        *(key for key, metric in METRICS.items() if metric.is_recorded),
    ]


def known_names(names: Names = NO_NAMES) -> list[str]:
    """Return all names that `find_field` knows: fields of every run, aliases, config keys, and `names`.

    Imports the config schema, unless they are those of foreign runs.
    """
    theirs = [*names.directions, *names.parameters]
    if names.is_foreign:
        return [*FOREIGN_FIELDS, *FOREIGN_METRICS, *theirs]
    aliases = [name for name, key in ALIASES.items() if key not in METRICS or METRICS[key].is_recorded]
    return [*field_names(), *aliases, *(key for key in default_values() if key not in ALIASES), *theirs]


def _shared_field(wanted: str) -> Field | None:
    name = fold_name(wanted)
    metric = METRICS.get(name)
    return ROW_FIELDS.get(name) if metric is None or not metric.is_recorded else _metric_field(metric)


def _own_row(name: str, names: Names, *, best: bool) -> Metric:
    if names.is_foreign:
        return foreign_metric(name, best=best)
    return own_metric(name, best=best, better=names.directions.get(name))


def _logged_field(logged: str, names: Names, other: Field | None = None, *, best: bool = False) -> Field:
    """Return the field of the metric that a run itself calls `logged`, whatever its key, or of its best value. Runs
    that have none have the value of `other`."""
    metric = _own_row(logged, names, best=best)

    def value(row: RunRow) -> Any:
        key = row.record.key_of(logged)
        if key is None or (best and key in METRICS and not names.is_foreign):
            return None if other is None else other.value(row)
        return row.record.values.get(metric.source if best else key)

    return replace(_metric_field(metric), name=f"best_{logged}" if best else logged, value=value)


def _metric_field(metric: Metric) -> Field:
    kind, descending = _KINDS.get(metric.unit, FieldKind.NUMBER), metric.better is not Better.LOW
    return Field(metric.key, kind, lambda row: metric.of_run(row.record), descending, metric)


def _config_field(key: str) -> Field:
    def value(row: RunRow) -> Any:
        config = row.record.config
        if row.record.command:
            names, parameters = _parameter_names(key), row.record.command_parameters
            known = (config or {}).get(key, row.record.values.get(names[-1]))
            return next((parameters[name] for name in names if name in parameters), known)
        if config is None:
            return None
        found = config[key] if key in config else default_values()[key]
        return "none" if found is None else found

    return Field(key, FieldKind.CONFIG, value)


@cache
def _parameter_names(key: str) -> tuple[str, ...]:
    """Return what commands call the parameter that a config key sets: `lr` of `optim.lr`.

    Several keys end in `name`, and the --name of a script is none of them."""
    short = key.rpartition(".")[2]
    aliases = [alias for alias, meant in ALIASES.items() if meant == key]
    is_unique = sum(each.rpartition(".")[2] == short for each in default_values()) == 1
    return (key, *aliases, *([short] if is_unique else []))


def _parameter_field(key: str, names: Names) -> Field:
    def value(row: RunRow) -> Any:
        found = row.record.command_parameters.get(key, _UNKNOWN)
        return None if found is _UNKNOWN else "none" if found is None else found

    return Field(key if names.is_foreign else COMMAND_PREFIX + key, FieldKind.PARAMETER, value, title=key)


def _option_field(key: str, option: str) -> Field:
    def value(row: RunRow) -> Any:
        options = (row.record.config or {}).get(key)
        return options.get(option) if isinstance(options, dict) else None

    return Field(f"{key}.{option}", FieldKind.CONFIG, value)


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
