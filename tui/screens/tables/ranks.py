"""The table of the ranks of a run: GPU, load, memory, power, data wait and the past load of each rank.

`tui.screens.pollers.run` gathers the readings from the journal, so that an ended run shows what its GPUs did then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from engine.base.text import printable
from engine.base.units import format_duration, format_rate, format_share
from engine.gpus.snapshot import Snapshot
from engine.report.readings import READINGS
from engine.report.table import GAP, Align, Column, Line, fit
from engine.runs.metrics import METRICS
from engine.runs.records import GpuSample, RankDevice
from tui.charts.history import DOTS_PER_COLUMN, LoadHistory, history_graph, shown_seconds, time_axis
from tui.screens.phrases import gpu_name
from tui.screens.tables import styled
from tui.screens.tables.gpus import FIRST_READING, reading_column
from tui.terminal.palette import BAD, MUTED, STRONG, WARNING

if TYPE_CHECKING:
    from engine.runs.command_events import CommandStarted
    from engine.runs.events import RunStarted
    from engine.runs.history import History

MIN_METER_COLUMNS, MAX_METER_COLUMNS = 5, 14
MIN_GRAPH_COLUMNS = 8
# Journals have a sample of each GPU every five seconds.
SAMPLE_SECONDS = 5.0
# Three times the five seconds between `gpus` events.
GPU_STALE_SECONDS = 15.0
# From this width, all tables of ranks have room for a graph.
GRAPH_MIN_WIDTH, GRAPH_SHARE = 90, 5
POWER_METER_MIN_WIDTH = 120
LONG_DATA_WAIT = 0.1
DETAILS_INDENT = 6
# What an ended run shows of each GPU.
MEANS, MAXIMA = ("util", "power"), ("memory_used", "temperature")


@dataclass(frozen=True)
class RankReadings:
    """What the journal, or this host, tells about the ranks of a run."""

    started: RunStarted | None = None
    command: CommandStarted | None = None
    """The start of the command of another program, whose GPUs have the table then."""
    live: bool = False
    samples: Sequence[GpuSample] = ()
    """The latest readings of the GPUs."""
    samples_time: float = 0.0
    """Unix seconds of the latest readings."""
    figures: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Readings of each GPU over the whole run by its UUID: means, and the maximum of `MAXIMA`. None if unknown."""
    data_wait: Mapping[int, float] = field(default_factory=dict)
    """Share of the training time that each rank waited for data, 0 to 1."""
    images_per_second: float | None = None
    """Throughput of all ranks."""
    seconds: float = 0.0
    """Duration of the run."""
    loads: Mapping[str, LoadHistory] = field(default_factory=dict)
    """Past GPU utilization by UUID, in percent."""
    loads_since: float = 0.0
    """Unix seconds of the first of them."""

    @property
    def count(self) -> int:
        """Number of ranks of a training, at least one; of a command, that of its GPUs."""
        started = self.started
        return (
            len(self.gpu_devices) if self.command is not None else 1 if started is None else max(len(started.ranks), 1)
        )

    @property
    def gpu_devices(self) -> list[str]:
        """UUIDs of the GPUs of a command."""
        return [] if self.command is None else [device for device in self.command.devices if device != "cpu"]


def rank_readings(
    history: History, loads: Mapping[str, LoadHistory], loads_since: float, *, live: bool
) -> RankReadings:
    """Return the readings of the ranks from the state of the run and the past load of its GPUs."""
    latest, epoch, step = history.latest_gpus, history.latest_session_epoch, history.latest_step
    if epoch is not None:
        timings = epoch.rank_timings
        data_wait = {timing.rank: timing.data_wait_seconds / timing.seconds for timing in timings if timing.seconds > 0}
    else:
        # During the first epoch, only rank 0 reports it.
        data_wait = {0: step.data_wait} if step is not None else {}
    rate = step.images_per_second if step is not None else epoch.images_per_second if epoch is not None else None
    return RankReadings(
        started=history.started,
        command=history.command,
        live=live,
        samples=latest.gpus if latest else (),
        samples_time=latest.time if latest else 0.0,
        figures={
            uuid: {key: stats.mean(key) for key in MEANS} | {key: stats.maxima.get(key) for key in MAXIMA}
            for uuid, stats in history.gpus.items()
        },
        data_wait=data_wait,
        images_per_second=rate,
        seconds=history.total_seconds,
        loads=loads,
        loads_since=loads_since,
    )


def rank_lines(readings: RankReadings, snapshot: Snapshot | None, width: int, rows: int) -> tuple[str, list[Text]]:
    """Return the title of the panel, and a header and `rows` lines per rank, none wider than `width`.

    `snapshot` names the GPUs of this host by their index and has their capacity.
    """
    started = readings.started or readings.command
    if started is None:
        return "ranks", [Text("The run is starting", MUTED)]
    if not started.ranks:
        return "ranks", [Text(f"{len(started.devices)} devices; no rank info in the journal", MUTED)]
    on_cpu = set(started.devices) == {"cpu"}
    keys = [rank.device for rank in started.ranks]
    has_graphs = any(key in readings.loads for key in keys)
    columns = _cpu_columns(readings) if on_cpu else _gpu_columns(readings, snapshot, width)
    graph_room = width // GRAPH_SHARE if has_graphs and width >= GRAPH_MIN_WIDTH else 0
    table = fit(columns, started.ranks, max(width - graph_room, 1))
    table_width = sum(table.widths) + len(GAP) * len(table.widths)
    graph_columns = width - table_width if has_graphs and width - table_width >= MIN_GRAPH_COLUMNS else 0
    seconds = _graph_seconds(readings, keys, DOTS_PER_COLUMN * graph_columns)
    header = styled(table.header(MUTED))
    if graph_columns:
        span = shown_seconds(seconds, DOTS_PER_COLUMN * graph_columns)
        axis = time_axis(span, graph_columns, end="now" if readings.live else "end")
        header = _cut(header, table_width).append_text(axis)
    lines = [header]
    for rank, key in zip(started.ranks, keys, strict=True):
        block = [Text(no_wrap=True, end="") for _ in range(rows)]
        block[0] = styled(table.line(rank, _silence(readings, rank)))
        if rows > 1:
            details = Text(" " * DETAILS_INDENT + _details(readings, rank), MUTED, no_wrap=True, end="")
            details.truncate((table_width if graph_columns else width) - len(GAP), overflow="ellipsis")
            block[1] = Text.assemble(details, no_wrap=True, end="")
        if graph_columns and key in readings.loads:
            values = readings.loads[key].columns(seconds, DOTS_PER_COLUMN * graph_columns)
            block = [
                _cut(line, table_width).append_text(graph)
                for line, graph in zip(block, history_graph(values, rows), strict=True)
            ]
        lines += block
    return _title(readings, on_cpu), [_cut(line, max(width, 1), pad=False) for line in lines]


def _cut(line: Text, width: int, *, pad: bool = True) -> Text:
    line.truncate(width, overflow="ellipsis", pad=pad)
    return line


def _title(readings: RankReadings, on_cpu: bool) -> str:
    title = "GPUs" if readings.command is not None else "ranks on the CPU" if on_cpu else "ranks"
    if not readings.live and not on_cpu:
        return f"{title} ─ mean and maximum of the whole run"
    age = time.time() - readings.samples_time
    if readings.live and readings.samples and age > GPU_STALE_SECONDS:
        return f"{title} ─ {format_duration(age)} ago"
    return title


def _graph_seconds(readings: RankReadings, keys: Sequence[str], values: int) -> float:
    """Return the time that the graphs show: of a live run what fits, of an ended one all."""
    if not readings.live:
        latest = max((readings.loads[key].latest_time for key in keys if key in readings.loads), default=0.0)
        return max(latest - readings.loads_since, SAMPLE_SECONDS)
    # Whole minutes, so that the graph is not drawn anew with each sample.
    return min(values * SAMPLE_SECONDS, math.ceil(max(readings.seconds, 1.0) / 60) * 60)


def _details(readings: RankReadings, rank: RankDevice) -> str:
    """Return the second line of a rank: activity and clock of its GPU, then its PID and host."""
    if rank.device == "cpu":
        return ""  # the first line has them
    sample = _sample(readings, rank)
    known = [(READINGS[key], getattr(sample, key, None)) for key in ("sm_active", "tensor_active", "sm_clock")]
    parts = [f"{reading.label} {reading.text(value)}" for reading, value in known if value is not None]
    return printable("   ".join([*parts, f"pid {rank.pid}", rank.host]))


def _sample(readings: RankReadings, rank: RankDevice) -> GpuSample | None:
    """Return the latest readings of the GPU of a rank; None without any, or after the end of the run."""
    samples = readings.samples if readings.live else ()
    return next((sample for sample in samples if sample.uuid == rank.device), None)


def _silence(readings: RankReadings, rank: RankDevice) -> tuple[str, Line] | None:
    """Return what replaces the readings of a GPU that did not answer."""
    sample = _sample(readings, rank)
    if sample is None or sample.state in (None, "ok"):
        return None
    return FIRST_READING, ((str(sample.state), BAD),)


def _gpu_columns(readings: RankReadings, snapshot: Snapshot | None, width: int) -> list[Column[RankDevice]]:
    started = readings.started or readings.command
    ranks = started.ranks if started is not None else []
    samples = {rank.device: _sample(readings, rank) for rank in ranks}
    capacities = {rank.device: _capacity(rank.device, snapshot) for rank in ranks}

    def value(rank: RankDevice, key: str) -> Any:
        """Return a reading of the GPU of a rank, or of an ended run its mean or maximum."""
        if key in capacities[rank.device]:
            return capacities[rank.device][key]
        if readings.live:
            return getattr(samples[rank.device], key, None)
        return readings.figures.get(rank.device, {}).get(key)

    def slowed_by(rank: RankDevice) -> str:
        sample = samples[rank.device]
        return "" if sample is None else READINGS["throttle"].value_text(sample.throttle_reasons)

    # Key, priority, cells of the meter.
    others = (
        ("memory_used", 6, _meter_columns(width) if width >= GRAPH_MIN_WIDTH else 0),
        ("power", 5, _meter_columns(width) // 2 if width >= POWER_METER_MIN_WIDTH else 0),
        ("temperature", 4, 0),
    )
    columns = [
        _rank_column(),
        Column[RankDevice]("gpu", "GPU", lambda rank: gpu_name(rank.device, snapshot), Align.RIGHT, priority=9),
        reading_column(FIRST_READING, ranks, value, _meter_columns(width), priority=8),
        *(reading_column(key, ranks, value, meter, priority) for key, priority, meter in others),
        _data_wait_column(readings),
        Column[RankDevice](
            "slowed_by", READINGS["throttle"].label, slowed_by, style=WARNING, priority=1, optional=True
        ),
    ]
    # Only the ranks of a training tell more than their GPUs.
    of_training = ("rank", "data_wait") if readings.command is not None else ()
    return [column for column in columns if column.key not in of_training]


def _capacity(device: str, snapshot: Snapshot | None) -> dict[str, Any]:
    """Return the memory and the power limit of a GPU by the keys of their readings. A MIG instance has no limit."""
    for gpu in snapshot.gpus if snapshot is not None else ():
        if gpu.uuid == device:
            return {key: gpu.value(key) for key in ("memory_total", "power_limit")}
        for instance in gpu.instances:
            if instance.uuid == device:
                return {"memory_total": instance.memory_total.value}
    return {}


def _cpu_columns(readings: RankReadings) -> list[Column[RankDevice]]:
    started, rate = readings.started, readings.images_per_second
    columns = [
        _rank_column(),
        Column[RankDevice]("pid", "pid", lambda rank: str(rank.pid), Align.RIGHT, priority=8),
    ]
    if rate is not None and started is not None:
        share = format_rate(rate / max(started.world_size, 1))
        columns.append(Column("rate", METRICS["rate_now"].unit.value, lambda _: share, Align.RIGHT, priority=6))
    columns.append(_data_wait_column(readings))
    return [*columns, Column[RankDevice]("host", "host", lambda rank: rank.host, priority=1, flex=True, width=4)]


def _rank_column() -> Column[RankDevice]:
    return Column("rank", "rank", lambda rank: str(rank.rank), Align.RIGHT, style=STRONG, priority=9)


def _meter_columns(width: int) -> int:
    return min(max((width - 40) // 6, MIN_METER_COLUMNS), MAX_METER_COLUMNS)


def _data_wait_column(readings: RankReadings) -> Column[RankDevice]:
    metric = METRICS["data_wait"]

    def style(rank: RankDevice) -> str:
        return WARNING if readings.data_wait.get(rank.rank, 0.0) >= LONG_DATA_WAIT else ""

    return Column(
        metric.key, metric.label, lambda rank: format_share(readings.data_wait.get(rank.rank)), Align.RIGHT,
        priority=7, style=style,
    )  # fmt: skip
