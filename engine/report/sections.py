"""What a page says of one run, as text and pictures: the values of `page.html`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import numpy as np

from engine.config.command_line import format_value, repeat_arguments
from engine.config.differences import SESSION_KEYS
from engine.config.yaml_io import MAX_CONFIG_BYTES
from engine.report.runs import OwnRun
from engine.runs.events import EpochEvent
from engine.runs.folder import RunState
from engine.runs.metrics import (
    METRICS,
    Aggregate,
    Metric,
    Unit,
    format_metric,
    own_metric,
)
from engine.runs.run_config import default_values
from engine.show.table import Column, Row, text_cells
from engine.utils.files import read_bytes
from engine.utils.text import list_names, pluralize
from engine.utils.units import (
    UNKNOWN,
    format_count,
    format_utc,
)

MAX_EPOCH_ROWS = 200
MAX_GPUS, MAX_HOSTS = 64, 16
# Columns of the user's own metrics; more would not fit on paper.
MAX_OWN_METRICS = 6
MAX_VALUE_CHARACTERS = 400
MAX_NAME_CHARACTERS = 60


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A table of the page: its columns and rows, how many more rows there are, and which are set off."""

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    more: int = 0
    is_strong: Callable[[Row], bool] = lambda row: False

    def cells(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a row."""
        return text_cells(self.columns, row)


def state_text(run: OwnRun) -> str:
    """Return the state of a run, with why it ended if it did not finish."""
    finished = run.history.finished
    if run.compared.state == RunState.CRASHED:
        return "crashed: its process ended without a word"
    if finished is None or run.compared.state == RunState.FINISHED or not finished.message:
        return run.compared.shown_state
    return f"{run.compared.state}: {finished.message}"


def subtitle(run: OwnRun) -> str:
    """Return what was trained, where and when, in one line."""
    started, config = run.history.started, run.compared.config or {}
    parts = []
    if config:
        parts.append(f"{value_text(config.get('model.name'))} on {value_text(config.get('data.dataset'))}")
    if started is not None:
        devices = len(set(started.devices) - {"cpu"})
        where = pluralize(devices, "GPU") if devices else f"{pluralize(started.world_size, 'rank')} on the CPU"
        parts += [
            where,
            f"started {format_utc(started.time)}",
        ]
    return ", ".join(parts)


def figures(run: OwnRun, metrics: Iterable[Metric]) -> list[tuple[str, str]]:
    """Return the key figures, the most important first."""
    started = run.history.started
    if started is None:
        return []
    values: list[tuple[str, str]] = []
    for metric in metrics:
        value = metric.of_run(run.compared.record)
        if value is not None and metric.aggregate is not Aggregate.NOW:
            values.append((value_text(metric.label), format_metric(metric, value)))
    values.append(("training images", format_count(started.train_images)))
    values.append(("validation images", format_count(started.val_images)))
    values.append(("classes", format_count(started.classes)))
    return values


def short_name(name: str) -> str:
    """Return a name of bounded length."""
    return name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 1] + "…"


def value_text(value: Any) -> str:
    """Return a config value, a parameter or a label as text of bounded length."""
    text = format_value(value) or "none"
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "…"


def epoch_table(epochs: Sequence[EpochEvent], best: EpochEvent | None) -> Table[EpochEvent]:
    """Return the results of each epoch; of a long run evenly spaced ones, the best one and the last one."""
    kept = set(np.linspace(0, len(epochs) - 1, min(len(epochs), MAX_EPOCH_ROWS)).round().astype(int).tolist())
    own = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))[:MAX_OWN_METRICS]
    # At an epoch, the best metrics are those of the trained or of the EMA weights.
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.aggregate is not Aggregate.BEST
        # A count of zero in all epochs says nothing.
        and any(value if metric.unit is Unit.COUNT else value is not None for value in map(metric.of_epoch, epochs))
    ]
    columns = [Column[EpochEvent]("epoch", "epoch", lambda epoch: str(epoch.epoch))]
    columns += [
        Column(metric.key, value_text(metric.label), partial(_epoch_cell, metric))
        for metric in (*metrics, *map(own_metric, own))
    ]
    rows = [epoch for index, epoch in enumerate(epochs) if index in kept or epoch is best]
    return Table(columns, rows, len(epochs) - len(rows), lambda epoch: epoch is best)


def _epoch_cell(metric: Metric, epoch: EpochEvent) -> str:
    value = metric.of_epoch(epoch)
    return UNKNOWN if value is None else format_metric(metric, value)


def hardware(run: OwnRun) -> list[tuple[str, str]]:
    """Return hosts, devices, processes and versions of the last session."""
    started = run.history.started
    if started is None:
        return []
    hosts = list(dict.fromkeys([rank.host for rank in started.ranks] or [started.host]))
    gpus = list(dict.fromkeys(device for device in started.devices if device != "cpu"))
    devices = f"{pluralize(len(gpus), 'GPU')}: {list_names(gpus, MAX_GPUS)}" if gpus else "CPU"
    rows = [
        ("hosts", list_names(hosts, MAX_HOSTS)),
        ("devices", devices),
        ("backend", started.backend),
        ("batch size", f"{started.batch_size} per rank, {started.global_batch} in total"),
        ("input pipeline", f"{started.pipeline} ({started.pipeline_reason})"),
        ("precision", started.precision),
    ]
    return rows + [(f"version of {name}", version) for name, version in sorted(started.versions.items())]


CHANGE_COLUMNS: tuple[Column[tuple[str, Any, Any]], ...] = (
    Column("key", "key", lambda change: change[0]),
    Column("value", "value", lambda change: value_text(change[1])),
    Column("default", "default", lambda change: value_text(change[2])),
)


def config_changes(run: OwnRun) -> Table[tuple[str, Any, Any]]:
    """Return the config keys that differ from their defaults."""
    config, defaults = run.compared.config or {}, default_values()
    rows = [
        (key, value, defaults[key])
        for key, value in config.items()
        if key in defaults and key not in SESSION_KEYS and value != defaults[key]
    ]
    return Table(CHANGE_COLUMNS, rows)


def repeat_command(run: OwnRun) -> str:
    """Return the command that trains the same again, for a shell; "" without a config."""
    config = run.compared.config
    if config is None:
        return ""
    kept = {key: value for key, value in config.items() if key not in SESSION_KEYS}
    words = [shlex.quote(word) for word in repeat_arguments(kept, default_values())]
    return " \\\n    ".join(("gputrain run", *words))


def notes(run: OwnRun) -> Iterator[str]:
    """Yield what a reader should know before the figures."""
    if run.compared.problem is not None:
        yield run.compared.problem
    if run.history.cpu_fallback:
        yield run.history.cpu_fallback
    if run.curves.nonfinite_count:
        yield f"{run.curves.nonfinite_count:,} losses or results are not finite; the curves have gaps there."
    if RunState(run.compared.state).live:
        yield "The run is not over: this is its state when the report was made."


def config_lines(run: OwnRun) -> list[str]:
    """Return the stored config as it is; nothing if it cannot be read."""
    try:
        return read_bytes(run.folder.config, MAX_CONFIG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
