"""Names for what a run list can show, sort and filter by: metrics, fields of a row, config keys, labels, aliases.

The numbers are those of `engine.runs.metrics`. `engine.runs.query` filters and sorts with the names, `gputrain runs
--columns` and the screen of runs show their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from engine.foreign.activity import Activity
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
    find_key,
    fold_name,
    foreign_metric,
    own_metric,
)
from engine.runs.run_config import default_values
from engine.runs.run_record import DIVERGED
from engine.runs.run_row import UNREADABLE, RunRow
from engine.utils.errors import UsageError, nearest
from engine.utils.text import list_names


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
    PARAMETER = "parameter"
    """A value that another program was configured with."""


@dataclass(frozen=True)
class Field:
    """A named value of a run. `value` returns None if it is unknown. A number of the record has a `metric`.

    `descending` is the direction in which people sort it: the best and the newest first.
    """

    name: str
    kind: Kind
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
        if self.kind is Kind.CONFIG:
            return isinstance(default_values().get(self.name), str)
        return self.kind in (Kind.TEXT, Kind.TAGS)


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
        Field("name", Kind.TEXT, lambda row: row.name),
        Field("state", Kind.TEXT, lambda row: row.state, choices=(*RunState, *SHOWN_STATES)),
        Field("tags", Kind.TAGS, lambda row: row.tags),
        Field("note", Kind.TEXT, lambda row: row.note),
        Field("archived", Kind.FLAG, lambda row: row.archived),
        Field("age", Kind.DURATION, lambda row: row.age_seconds),
        Field("started_at", Kind.DATE, lambda row: row.record.started_at, descending=True),
        Field("updated_at", Kind.DATE, lambda row: row.record.updated_at, descending=True),
        Field("sweep", Kind.TEXT, lambda row: row.sweep or None),
        Field("host", Kind.TEXT, lambda row: row.record.host or None),
        Field("phase", Kind.TEXT, lambda row: row.record.phase or None),
        Field("message", Kind.TEXT, lambda row: row.message),
        Field("bottleneck", Kind.TEXT, lambda row: row.record.bottleneck and row.record.bottleneck.message),
        Field("learning", Kind.TEXT, lambda row: row.record.learning and row.record.learning.message),
        Field("foreign", Kind.FLAG, lambda row: row.foreign is not None),
        Field("diverged", Kind.FLAG, lambda row: row.shown_state == DIVERGED),
        Field("live", Kind.FLAG, lambda row: row.live),
        Field("folder", Kind.TEXT, lambda row: row.folder),
        Field("format", Kind.TEXT, lambda row: row.format),
        Field("command", Kind.TEXT, lambda row: row.record.command or None),
        Field("exit_code", Kind.NUMBER, lambda row: row.record.exit_code),
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
_UNKNOWN = object()
COMMAND_PREFIX = "command."
"""Of the names of fields that are parameters of commands, whatever they are called."""
_KINDS = {Unit.SCORE: Kind.SHARE, Unit.SHARE: Kind.SHARE, Unit.SECONDS: Kind.DURATION}
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


def find_field(
    name: str,
    own: Mapping[str, Better] = NO_METRICS,
    parameters: Collection[str] | None = None,
    arguments: Collection[str] = (),
) -> Field:
    """Return the field that a name means: a metric, a field of every row, an alias, a config key, the last part of one
    config key only, one of the metrics in `own`, as `metric_names` returns them, a metric by what other programs call
    it, or one of the `arguments`, parameters of commands (`command_arguments`). The heading of a field is a name of it,
    too.

    Runs of other programs have `parameters` instead of config keys, whose names these are; it is None for runs of
    gputrain. Raises UsageError, with the nearest known name.
    """
    if parameters is not None:
        return _find_foreign_field(name, own, parameters)
    wanted = name.casefold()
    wanted = ALIASES.get(fold_name(name), _HEADINGS.get(fold_name(name), wanted))
    if (field := _find_shared_field(wanted)) is not None:
        logged = _BEST.sub("", name)
        return _with_command_metric(field, name, own) if name in own or logged in own else field
    for prefix in (METRIC_PREFIX, BEST_PREFIX):
        if wanted.startswith(prefix) and wanted != prefix:
            # Not folded: the name of a metric is the user's.
            return _own_field(name[len(prefix) :], own, best=prefix == BEST_PREFIX)
    if wanted.startswith(COMMAND_PREFIX) and wanted != COMMAND_PREFIX:
        return _argument_field(name[len(COMMAND_PREFIX) :])
    if wanted in ALIASES.values() and wanted not in METRICS:
        return _config_field(wanted)
    keys, wanted = default_values(), wanted.replace(" ", "_")
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
    registered = METRICS.get(find_key(name) or "")
    for logged in (name, _BEST.sub("", name)):
        if logged in own:
            field = _own_field(logged, own, best=logged != name)
            return field if registered is None else _with_registered(field, registered, logged)
    if name in arguments:
        return _argument_field(name)
    if registered is not None:
        return _metric_field(registered)
    from engine.config.key_names import REMOVED_KEYS

    if any(wanted in (key, key.partition(".")[2]) for key in REMOVED_KEYS):
        reason = "is a config key of an earlier version, and runs cannot be listed by it"
        raise UsageError.one(name, reason, "search the config.yaml in their folders for it", code="unknown-key")
    found = nearest(wanted, known_names([*own, *arguments]))
    advice = "" if found is None else f"did you mean {quote_key(found)}?"
    raise UsageError.one(name, "is no metric of a run and no config key", advice, code="unknown-key")


def _find_foreign_field(name: str, own: Collection[str], parameters: Collection[str]) -> Field:
    """Return a field of runs of other programs: one of every row, a metric of the registry, a parameter, a metric by
    the name that the runs have for it, or the last part of one of these only. Raises UsageError."""
    folded = name.casefold()
    shared = _FOREIGN_ALIASES.get(folded, folded)
    if shared in FOREIGN_FIELDS or shared in FOREIGN_METRICS:
        if shared == "state":
            return replace(ROW_FIELDS[shared], choices=(*Activity, *SHOWN_STATES))
        if shared == "age":
            return replace(ROW_FIELDS[shared], title="changed")
        return _metric_field(METRICS[shared]) if shared in METRICS else ROW_FIELDS[shared]
    for prefix in (METRIC_PREFIX, BEST_PREFIX):
        if name.startswith(prefix) and name != prefix and name not in parameters:
            return _metric_field(foreign_metric(name[len(prefix) :], best=prefix == BEST_PREFIX))
    for wanted in (name, _SYNONYMS.get(folded, name)):
        if wanted in parameters:
            return _parameter_field(wanted)
        if wanted in own:
            return _metric_field(METRICS["lr"]) if wanted == "lr" else _logged_field(wanted)
        if (rest := wanted.removeprefix("best_")) != wanted and rest in own:
            return _logged_field(rest, best=True)
        # `lr` of `optimizer.lr`, `loss` of `train/loss`.
        folded = wanted.casefold()
        for names, make in ((parameters, _parameter_field), (own, _logged_field)):
            matches = [key for key in names if _LAST_PART.split(key)[-1].casefold() == folded]
            if len(matches) == 1:
                return make(matches[0])
            if matches:
                reason = f"is part of several names: {list_names(sorted(matches), 5)}; write one of them"
                raise UsageError.one(name, reason, code="ambiguous-name")
    if (key := find_key(name)) in FOREIGN_METRICS:
        return _metric_field(METRICS[key])
    found = nearest(folded, known_names(own, parameters))
    advice = "" if found is None else f"did you mean {quote_key(found)}?"
    raise UsageError.one(name, "is no metric and no parameter of these runs", advice, code="unknown-key")


def field_names() -> list[str]:
    """Return the names of the fields that every run has."""
    return [
        *(name for name in ROW_FIELDS if name != "format"),
        *(key for key, metric in METRICS.items() if metric.is_recorded),
    ]


def known_names(own: Iterable[str] = (), parameters: Iterable[str] | None = None) -> list[str]:
    """Return all names that `find_field` knows: fields of every run, aliases, config keys, and the `own` metrics.

    Imports the config schema, unless `parameters` are those of runs of other programs.
    """
    if parameters is not None:
        return [*FOREIGN_FIELDS, *FOREIGN_METRICS, *parameters, *own]
    aliases = [name for name, key in ALIASES.items() if key not in METRICS or METRICS[key].is_recorded]
    return [*field_names(), *aliases, *(key for key in default_values() if key not in ALIASES), *own]


def _find_shared_field(wanted: str) -> Field | None:
    name = fold_name(wanted)
    metric = METRICS.get(name)
    return ROW_FIELDS.get(name) if metric is None or not metric.is_recorded else _metric_field(metric)


def _own_field(name: str, own: Mapping[str, Better], *, best: bool) -> Field:
    return _metric_field(own_metric(name, best=best, better=own.get(name)))


def _logged_field(name: str, *, best: bool = False) -> Field:
    """Return the field of a metric of runs of other programs by the name that they have for it, whatever its key."""
    field = _metric_field(foreign_metric(name, best=best))

    def last(row: RunRow) -> float | None:
        key = row.record.metric_keys.get(name)
        return None if key is None else row.record.values.get(key)

    return replace(field, name=f"best_{name}" if best else name, value=field.value if best else last)


def _metric_field(metric: Metric) -> Field:
    kind, descending = _KINDS.get(metric.unit, Kind.NUMBER), metric.better is not Better.LOW
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

    return Field(key, Kind.CONFIG, value)


@cache
def _parameter_names(key: str) -> tuple[str, ...]:
    """Return what commands call the parameter that a config key sets: `lr` of `optim.lr`.

    Several keys end in `name`, and the --name of a script is none of them."""
    short = key.rpartition(".")[2]
    aliases = [alias for alias, meant in ALIASES.items() if meant == key]
    is_unique = sum(each.rpartition(".")[2] == short for each in default_values()) == 1
    return (key, *aliases, *([short] if is_unique else []))


def _with_command_metric(field: Field, name: str, own: Mapping[str, Better]) -> Field:
    """Return a field that is, for a command, the metric that it calls so, such as `loss`, or the best value of it, as
    `best_accuracy`, if it has one.

    Its heading is that name, because it is not the same metric for all runs."""
    logged = name if name in own else _BEST.sub("", name)
    best = _own_field(logged, own, best=True)

    def value(row: RunRow) -> Any:
        key = row.record.metric_keys.get(logged) if row.record.command else None
        if logged != name:
            return best.value(row) if key == METRIC_PREFIX + logged else field.value(row)
        return field.value(row) if key is None else row.record.values.get(key)

    return replace(field, name=name, value=value, title=name)


def _with_registered(field: Field, registered: Metric, logged: str) -> Field:
    """Return the field of a metric that some runs call `logged`, and that is `registered` in all others."""

    def value(row: RunRow) -> Any:
        is_own = METRIC_PREFIX + logged in row.record.values
        return field.value(row) if is_own else registered.of_run(row.record)

    prefix = "best_" if field.name.startswith(BEST_PREFIX) else ""
    return replace(field, name=prefix + logged, value=value)


def _argument_field(key: str) -> Field:
    def value(row: RunRow) -> Any:
        found = row.record.command_parameters.get(key, _UNKNOWN)
        return None if found is _UNKNOWN else "none" if found is None else found

    return Field(COMMAND_PREFIX + key, Kind.PARAMETER, value, title=key)


def command_arguments(rows: Iterable[RunRow]) -> tuple[str, ...]:
    """Return the names of the parameters that the commands of the rows have."""
    return tuple(dict.fromkeys(key for row in rows for key in row.record.command_parameters))


def _parameter_field(key: str) -> Field:
    def value(row: RunRow) -> Any:
        found = (row.record.config or {}).get(key, _UNKNOWN)
        return None if found is _UNKNOWN else "none" if found is None else found

    return Field(key, Kind.PARAMETER, value)


def _option_field(key: str, option: str) -> Field:
    def value(row: RunRow) -> Any:
        options = (row.record.config or {}).get(key)
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
