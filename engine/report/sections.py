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
from engine.report.charts import PageChart, time_chart
from engine.report.runs import OwnRun, read_config_text
from engine.report.timeline import LimitedStretch, Message, Session, limit_shares
from engine.runs.events import EpochEvent, RunStarted
from engine.runs.folder import RunState
from engine.runs.history import GpuStats
from engine.runs.labels import read_labels
from engine.runs.metrics import (
    METRICS,
    Aggregate,
    Metric,
    Unit,
    format_known,
    format_metric,
    own_metric,
)
from engine.runs.run_config import default_values
from engine.show.readings import READINGS
from engine.show.table import Column, Row, text_cells
from engine.utils.codec import UNSET
from engine.utils.text import list_names, pluralize
from engine.utils.units import (
    UNKNOWN,
    format_count,
    format_number,
    format_share,
    format_utc,
)

MAX_EPOCH_ROWS, MAX_SESSIONS, MAX_MESSAGES, MAX_STRETCHES = 200, 100, 100, 40
MAX_GPUS, MAX_HOSTS = 64, 16
MEAN_READINGS, HIGHEST_READINGS = ("util", "sm_active", "power"), ("memory_used", "temperature")
# Columns of the user's own metrics; more would not fit on paper.
MAX_OWN_METRICS = 6
MAX_VALUE_CHARACTERS = 400
UNKNOWN_LIMIT = "unknown"


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
            f"started {format_utc(run.timeline.sessions[0].started.time)}",
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


def value_text(value: Any) -> str:
    """Return a config value, a parameter or a label as text of bounded length."""
    text = format_value(value) or "none"
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "…"


def epoch_table(epochs: Sequence[EpochEvent], best: EpochEvent | None) -> Table[EpochEvent]:
    """Return the results of each epoch; of a long run evenly spaced ones, the best one and the last one."""
    kept = set(np.linspace(0, len(epochs) - 1, min(len(epochs), MAX_EPOCH_ROWS)).round().astype(int).tolist())
    own = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))[:MAX_OWN_METRICS]
    # At an epoch, the best metrics are those of the trained or of the EMA weights.
    metrics = [metric for metric in METRICS.values() if metric.aggregate is not Aggregate.BEST]
    metrics = [metric for metric in metrics if _is_shown(metric, map(metric.of_epoch, epochs))]
    metrics += map(own_metric, own)
    columns = [Column[EpochEvent]("epoch", "epoch", lambda epoch: str(epoch.epoch))]
    columns += [Column(metric.key, value_text(metric.label), partial(_epoch_cell, metric)) for metric in metrics]
    rows = [epoch for index, epoch in enumerate(epochs) if index in kept or epoch is best]
    return Table(columns, rows, len(epochs) - len(rows), lambda epoch: epoch is best)


def _is_shown(metric: Metric, values: Iterable[float | None]) -> bool:
    """Whether a value is known, and of a count not zero."""
    return any(value if metric.unit is Unit.COUNT else value is not None for value in values)


def _epoch_cell(metric: Metric, epoch: EpochEvent) -> str:
    value = metric.of_epoch(epoch)
    return UNKNOWN if value is None else format_metric(metric, value)


@dataclass(frozen=True)
class TimeSection:
    """What limited a run: a sentence, the share of each bottleneck, stretches of epochs, and the time of each epoch."""

    sentence: str
    shares: tuple[tuple[str, str], ...]
    stretches: Table[LimitedStretch]
    chart: PageChart | None

    @property
    def is_known(self) -> bool:
        """Whether the bottleneck of any epoch is known."""
        return any(kind != UNKNOWN_LIMIT for kind, _ in self.shares)


STRETCH_COLUMNS: tuple[Column[LimitedStretch], ...] = (
    Column(
        "epochs", METRICS["epochs"].label,
        lambda part: str(part.first) if part.first == part.last else f"{part.first}–{part.last}",
    ),
    Column("seconds", METRICS["seconds"].label, lambda part: format_known("seconds", part.seconds)),
    Column("limit", "limited by", lambda part: str(part.bottleneck.kind) if part.bottleneck else UNKNOWN_LIMIT),
    Column("message", "last diagnosis", lambda part: part.bottleneck.message if part.bottleneck else ""),
)  # fmt: skip


def time_section(run: OwnRun, name: str, command: str) -> TimeSection:
    """Return what limited the run, over its epochs."""
    timeline, current = run.timeline, run.history.bottleneck
    shares = [(kind or UNKNOWN_LIMIT, format_share(share)) for kind, share in limit_shares(timeline.epochs).items()]
    stretches = timeline.stretches()
    table = Table(STRETCH_COLUMNS, stretches[:MAX_STRETCHES], len(stretches) - MAX_STRETCHES)
    sentence = "" if current is None else current.message
    return TimeSection(sentence, tuple(shares), table, time_chart(timeline.epochs, name, command))


def hardware(run: OwnRun) -> list[tuple[str, str]]:
    """Return hosts, devices, processes and versions of the last session."""
    started = run.history.started
    if started is None:
        return []
    hosts = list(dict.fromkeys([rank.host for rank in started.ranks] or [started.host]))
    rows = [
        ("hosts", list_names(hosts, MAX_HOSTS)),
        ("devices", _devices(started)),
        ("backend", f"{started.backend}{_started_by(started)}"),
        ("batch size", f"{started.batch_size} per rank, {started.global_batch} in total"),
        ("input pipeline", _pipeline(started)),
        ("precision", started.precision),
        ("compiled model", "yes" if started.compiled else "no"),
    ]
    if started.peak_tflops is not UNSET:
        rows.append(("peak of the GPUs", f"{format_number(started.peak_tflops)} TFLOPS"))
    if started.flops is not UNSET:
        rows.append(("FLOPs per image", f"{started.flops / 1e9:.3g} G (forward and backward)"))
    rows += [(f"version of {name}", version) for name, version in sorted(started.versions.items())]
    return rows


def _started_by(started: RunStarted) -> str:
    return f", started by {started.start_method}" if started.start_method else ""


def _devices(started: RunStarted) -> str:
    gpus = list(dict.fromkeys(device for device in started.devices if device != "cpu"))
    if not gpus:
        return f"CPU, {pluralize(started.cores, 'core')} per rank" if started.cores else "CPU"
    return f"{pluralize(len(gpus), 'GPU')}: {list_names(gpus, MAX_GPUS)}"


def _pipeline(started: RunStarted) -> str:
    kind = "decode thread" if started.worker_type == "threads" else "worker"
    loaders = f", {pluralize(started.workers, kind)} per rank" if started.workers else ""
    return f"{started.pipeline}{loaders} ({started.pipeline_reason})"


def gpu_table(run: OwnRun) -> Table[tuple[str, GpuStats]]:
    """Return means and maxima of the readings of each GPU."""
    columns = [
        Column[tuple[str, GpuStats]]("uuid", "GPU", lambda row: row[0]),
        Column("host", "host", lambda row: row[1].host),
        *(Column(key, f"mean {READINGS[key].label}", partial(_mean_text, key)) for key in MEAN_READINGS),
        *(Column(key, f"highest {READINGS[key].label}", partial(_highest_text, key)) for key in HIGHEST_READINGS),
        Column(
            "throttle", READINGS["throttle"].label, lambda row: ", ".join(sorted(row[1].throttle_reasons)) or "nothing"
        ),
    ]
    rows = list(run.history.gpus.items())
    return Table(columns, rows[:MAX_GPUS], len(rows) - MAX_GPUS)


def _mean_text(key: str, row: tuple[str, GpuStats]) -> str:
    return READINGS[key].text(row[1].mean(key))


def _highest_text(key: str, row: tuple[str, GpuStats]) -> str:
    return READINGS[key].text(row[1].maxima.get(key))


def session_table(run: OwnRun) -> Table[tuple[int, Session]]:
    """Return when each session of the run began, on what, and how it ended."""
    sessions = list(enumerate(run.timeline.sessions, 1))

    def end(row: tuple[int, Session]) -> str:
        number, session = row
        is_live = number == len(sessions) and RunState(run.compared.state).live
        state = session.state or (run.compared.state if is_live else "ended without a word")
        return f"{state}: {session.message}" if session.message else state

    columns = [
        Column[tuple[int, Session]]("number", "session", lambda row: str(row[0])),
        Column("started", "started", lambda row: format_utc(row[1].started.time)),
        Column("from", "from", _beginning),
        Column("place", "on", lambda row: _place(row[1].started)),
        Column("seconds", METRICS["seconds"].label, lambda row: format_known("seconds", row[1].seconds)),
        Column("end", "end", end),
    ]
    return Table(columns, sessions[:MAX_SESSIONS], len(sessions) - MAX_SESSIONS)


def _beginning(row: tuple[int, Session]) -> str:
    number, session = row
    is_fresh = not session.from_step and number == 1
    return "fresh start" if is_fresh else f"resumed after step {format_count(session.from_step)}"


def _place(started: RunStarted) -> str:
    devices = len(set(started.devices) - {"cpu"})
    return f"{started.host}, " + (pluralize(devices, "GPU") if devices else pluralize(started.world_size, "CPU rank"))


MESSAGE_COLUMNS: tuple[Column[Message], ...] = (
    Column("time", "time", lambda message: format_utc(message.time)),
    Column("kind", "kind", lambda message: message.kind),
    Column(
        "text", "message",
        lambda message: message.text + (f" ({message.count} times)" if message.count > 1 else ""),
    ),
)  # fmt: skip


def message_table(run: OwnRun) -> Table[Message]:
    """Return warnings, failures of ranks and requests, in their order."""
    messages = list(run.timeline.messages.values())
    more = len(messages) - MAX_MESSAGES
    return Table(MESSAGE_COLUMNS, messages[:MAX_MESSAGES], more, lambda message: message.kind == "failure")


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


def config_lines(run: OwnRun) -> list[str]:
    """Return the lines of the stored config."""
    return read_config_text(run.folder).splitlines()


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


def labels(run: OwnRun) -> tuple[tuple[str, ...], str]:
    """Return tags and note that the user gave the run."""
    found = read_labels(run.folder)
    return found.tags, found.note
