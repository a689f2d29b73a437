"""What a page says of one run, as text and pictures: the values of `page.html`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.command_line import format_value, repeat_arguments
from engine.config.differences import SESSION_KEYS
from engine.report.charts import Chart, time_chart
from engine.report.runs import ReportedRun, read_config_text
from engine.report.text import UNKNOWN, number_text, percent_text, time_text
from engine.report.timeline import limit_shares
from engine.runs.events import EpochEvent, RunStarted
from engine.runs.folder import RunState
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
from engine.utils.codec import UNSET
from engine.utils.host import format_bytes
from engine.utils.text import format_duration, list_names, pluralize

MAX_EPOCH_ROWS, MAX_SESSIONS, MAX_MESSAGES, MAX_STRETCHES = 200, 100, 100, 40
MAX_GPUS, MAX_HOSTS = 64, 16
# Columns of the user's own metrics; more would not fit on paper.
MAX_OWN_METRICS = 6
MAX_VALUE_CHARACTERS = 400
UNKNOWN_LIMIT = "unknown"


@dataclass(frozen=True)
class Row:
    """A row of a table: its cells, and whether it is set off."""

    cells: tuple[str, ...]
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its column heads, its rows, and how many more there are."""

    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    more: int = 0


def state_text(run: ReportedRun) -> str:
    """Return the state of a run, with why it ended if it did not finish."""
    finished = run.history.finished
    if run.compared.state == RunState.CRASHED:
        return "crashed: its process ended without a word"
    if finished is None or run.compared.state == RunState.FINISHED or not finished.message:
        return run.compared.state
    return f"{run.compared.state}: {finished.message}"


def subtitle(run: ReportedRun) -> str:
    """Return what was trained, where and when, in one line."""
    started, config = run.history.started, run.compared.config or {}
    parts = []
    if config:
        parts.append(f"{_text(config.get('model.name'))} on {_text(config.get('data.dataset'))}")
    if started is not None:
        devices = len(set(started.devices) - {"cpu"})
        where = pluralize(devices, "GPU") if devices else f"{pluralize(started.world_size, 'rank')} on the CPU"
        parts += [
            where,
            f"started {time_text(run.timeline.sessions[0].started.time)}",
        ]
    return ", ".join(parts)


def figures(run: ReportedRun, metrics: Iterable[Metric]) -> list[tuple[str, str]]:
    """Return the key figures, the most important first."""
    started, best = run.history.started, run.history.best
    if started is None:
        return []
    values: list[tuple[str, str]] = []
    for metric in metrics:
        value = metric.of_run(run.compared.record)
        if value is None or metric.aggregate is Aggregate.NOW or metric.key == "total_epochs":
            continue
        text = format_metric(metric, value)
        values.append((_text(metric.label), f"{text} of {started.epochs:,}" if metric.key == "epochs" else text))
    if best is not None and best.val_top5 is not None and started.classes > 5:
        values.insert(1, (f"{METRICS['val_top5'].label} of that epoch", format_known("val_top5", best.val_top5)))
    values.append(("training images", f"{started.train_images:,}"))
    values.append(("validation images", f"{started.val_images:,}"))
    values.append(("classes", f"{started.classes:,}"))
    return values


def _text(value: Any) -> str:
    text = format_value(value) or "none"
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[:MAX_VALUE_CHARACTERS] + "…"


def epoch_table(epochs: Sequence[EpochEvent], best: EpochEvent | None) -> Table:
    """Return the results of each epoch; of a long run evenly spaced ones, the best one and the last one."""
    kept = set(np.linspace(0, len(epochs) - 1, min(len(epochs), MAX_EPOCH_ROWS)).round().astype(int).tolist())
    own = list(dict.fromkeys(name for epoch in epochs for name in epoch.metrics))[:MAX_OWN_METRICS]
    # At an epoch, the best metrics are those of the trained or of the EMA weights.
    metrics = [metric for metric in METRICS.values() if metric.aggregate is not Aggregate.BEST]
    metrics = [metric for metric in metrics if _is_shown(metric, map(metric.of_epoch, epochs))]
    metrics += map(own_metric, own)
    rows = []
    for index, epoch in enumerate(epochs):
        if index in kept or epoch is best:
            cells = [_cell(metric, metric.of_epoch(epoch)) for metric in metrics]
            rows.append(Row((str(epoch.epoch), *cells), epoch is best))
    heads = ("epoch", *(_text(metric.short_label) for metric in metrics))
    return Table(heads, tuple(rows), len(epochs) - len(rows))


def _is_shown(metric: Metric, values: Iterable[float | None]) -> bool:
    """Whether a value is known, and of a count not zero."""
    return any(value if metric.unit is Unit.COUNT else value is not None for value in values)


def _cell(metric: Metric, value: float | None) -> str:
    return UNKNOWN if value is None else format_metric(metric, value)


@dataclass(frozen=True)
class TimeSection:
    """What limited a run: a sentence, the share of each bottleneck, stretches of epochs, and the time of each epoch."""

    sentence: str
    shares: tuple[tuple[str, str], ...]
    stretches: Table
    chart: Chart | None

    @property
    def is_known(self) -> bool:
        """Whether the bottleneck of any epoch is known."""
        return any(kind != UNKNOWN_LIMIT for kind, _ in self.shares)


def time_section(run: ReportedRun, name: str, command: str) -> TimeSection:
    """Return what limited the run, over its epochs."""
    timeline, current = run.timeline, run.history.bottleneck
    shares = [(kind or UNKNOWN_LIMIT, percent_text(share)) for kind, share in limit_shares(timeline.epochs).items()]
    stretches = timeline.stretches()
    rows = []
    for stretch in stretches[:MAX_STRETCHES]:
        epochs = str(stretch.first) if stretch.first == stretch.last else f"{stretch.first}–{stretch.last}"
        limit = stretch.bottleneck
        kind, message = (UNKNOWN_LIMIT, "") if limit is None else (str(limit.kind), limit.message)
        rows.append(Row((epochs, format_duration(stretch.seconds), kind, message)))
    table = Table(("epochs", "time", "limited by", "last diagnosis"), tuple(rows), len(stretches) - len(rows))
    sentence = "" if current is None else current.message
    return TimeSection(sentence, tuple(shares), table, time_chart(timeline.epochs, name, command))


def hardware(run: ReportedRun) -> list[tuple[str, str]]:
    """Return hosts, devices, processes and versions of the last session."""
    started = run.history.started
    if started is None:
        return []
    hosts = list(dict.fromkeys([rank.host for rank in started.ranks] or [started.host]))
    rows = [
        ("hosts", list_names(hosts, MAX_HOSTS)),
        ("devices", _devices(started)),
        ("ranks", f"{started.world_size} ({started.backend}{_started_by(started)})"),
        ("batch size", f"{started.batch_size} per rank, {started.global_batch} in total"),
        ("input pipeline", _pipeline(started)),
        ("precision", started.precision),
        ("compiled model", "yes" if started.compiled else "no"),
    ]
    if started.peak_tflops is not UNSET:
        rows.append(("peak of the GPUs", f"{number_text(started.peak_tflops)} TFLOPS"))
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
    decoder = f", JPEG decoder {started.decoder} ({started.decoder_reason})" if started.decoder_reason else ""
    return f"{started.pipeline}{loaders} ({started.pipeline_reason}){decoder}"


def gpu_table(run: ReportedRun) -> Table:
    """Return means and maxima of the readings of each GPU."""
    rows = []
    for uuid, stats in list(run.history.gpus.items())[:MAX_GPUS]:
        memory, heat = stats.maxima.get("memory_used"), stats.maxima.get("temperature")
        cells = [uuid, stats.host]
        cells += [
            _unit(stats.mean("util"), " %"),
            _unit(stats.mean("sm_active"), " %"),
            _unit(stats.mean("power"), " W"),
        ]
        cells += [UNKNOWN if memory is None else format_bytes(memory), _unit(heat, " °C")]
        rows.append(Row((*cells, ", ".join(sorted(stats.throttle_reasons)) or "none")))
    heads = ("GPU", "host", "util", "SM active", "power", "most memory", "highest temperature", "throttled")
    return Table(heads, tuple(rows), len(run.history.gpus) - len(rows))


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def session_table(run: ReportedRun) -> Table:
    """Return when each session of the run began, on what, and how it ended."""
    sessions = run.timeline.sessions
    rows = []
    for number, session in enumerate(sessions[:MAX_SESSIONS], 1):
        is_last = number == len(sessions)
        end = session.state or ("" if is_last and RunState(run.compared.state).live else "ended without a word")
        if is_last and not session.state and not end:
            end = run.compared.state
        start = session.started
        begin = "fresh start" if not session.from_step and number == 1 else f"resumed after step {session.from_step:,}"
        devices = len(set(start.devices) - {"cpu"})
        place = f"{start.host}, " + (pluralize(devices, "GPU") if devices else pluralize(start.world_size, "CPU rank"))
        text = f"{end}: {session.message}" if session.message else end
        rows.append(Row((str(number), time_text(start.time), begin, place, format_duration(session.seconds), text)))
    heads = ("session", "started", "from", "on", "duration", "end")
    return Table(heads, tuple(rows), len(sessions) - len(rows))


def message_table(run: ReportedRun) -> Table:
    """Return warnings, failures of ranks and requests, in their order."""
    messages = list(run.timeline.messages.values())
    rows = []
    for message in messages[:MAX_MESSAGES]:
        repeated = f" ({message.count} times)" if message.count > 1 else ""
        rows.append(Row((time_text(message.time), message.kind, message.text + repeated), message.kind == "failure"))
    return Table(("time", "kind", "message"), tuple(rows), len(messages) - len(rows))


def config_changes(run: ReportedRun) -> Table:
    """Return the config keys that differ from their defaults."""
    config, defaults = run.compared.config or {}, default_values()
    rows = [
        Row((key, _text(value), _text(defaults[key])))
        for key, value in config.items()
        if key in defaults and key not in SESSION_KEYS and value != defaults[key]
    ]
    return Table(("key", "value", "default"), tuple(rows))


def config_lines(run: ReportedRun) -> list[str]:
    """Return the lines of the stored config."""
    return read_config_text(run.folder).splitlines()


def repeat_command(run: ReportedRun) -> str:
    """Return the command that trains the same again, for a shell; "" without a config."""
    config = run.compared.config
    if config is None:
        return ""
    kept = {key: value for key, value in config.items() if key not in SESSION_KEYS}
    words = [shlex.quote(word) for word in repeat_arguments(kept, default_values())]
    return " \\\n    ".join(("gputrain run", *words))


def notes(run: ReportedRun) -> Iterator[str]:
    """Yield what a reader should know before the figures."""
    if run.compared.problem is not None:
        yield run.compared.problem
    if run.history.cpu_fallback:
        yield run.history.cpu_fallback
    if run.curves.nonfinite_count:
        yield f"{run.curves.nonfinite_count:,} losses or results are not finite; the curves have gaps there."
    if RunState(run.compared.state).live:
        yield "The run is not over: this is its state when the report was made."


def labels(run: ReportedRun) -> tuple[tuple[str, ...], str]:
    """Return tags and note that the user gave the run."""
    found = read_labels(run.folder)
    return found.tags, found.note
