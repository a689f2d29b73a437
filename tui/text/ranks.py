"""The ranks of a run as lines: GPU, load, memory, power, data wait and the past load of each rank.

`tui.pollers.RunPoller` gathers the readings from the journal, so that an ended run shows what its GPUs did then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from engine.gpus.snapshot import Snapshot
from engine.utils.text import printable
from tui.charts.history import LoadHistory, history_graph, shown_seconds, time_axis
from tui.charts.meter import load_meter
from tui.charts.rank_loads import RankLoads, cpu_load_key
from tui.palette import BAD, MUTED, STRONG, WARNING
from tui.text.gpu_names import gpu_name
from tui.text.gpus import GIB
from tui.text.runs import format_duration
from tui.text.tables import UNKNOWN

if TYPE_CHECKING:
    from engine.runs.events import RunStarted
    from engine.runs.history import History
    from engine.runs.records import GpuSample, RankDevice

GAP = "  "
MIN_METER_COLUMNS, MAX_METER_COLUMNS = 5, 14
MIN_GRAPH_COLUMNS = 8
# Journals have a sample of each GPU every five seconds.
SAMPLE_SECONDS = 5.0
# Three times the five seconds between `gpus` events.
GPU_STALE_SECONDS = 15.0
WARM_CELSIUS, HOT_CELSIUS = 75, 85


@dataclass(frozen=True)
class GpuFigures:
    """Statistics of one GPU over the whole run; None if unknown."""

    util: float | None = None
    """Mean GPU utilization in percent."""
    power: float | None = None
    """Mean power draw in watts."""
    memory_used: float | None = None
    """Maximum GPU memory in use, in bytes."""
    temperature: float | None = None
    """Maximum temperature in degrees Celsius."""


@dataclass(frozen=True)
class RankReadings:
    """What the journal, or this host, tells about the ranks of a run."""

    started: RunStarted | None = None
    live: bool = False
    samples: Sequence[GpuSample] = ()
    """The latest readings of the GPUs."""
    samples_time: float = 0.0
    """Unix seconds of the latest readings."""
    figures: Mapping[str, GpuFigures] = field(default_factory=dict)
    """Statistics of each GPU by its UUID."""
    data_wait: Mapping[int, float] = field(default_factory=dict)
    """Share of the training time that each rank waited for data, 0 to 1."""
    images_per_second: float | None = None
    """Throughput of all ranks."""
    seconds: float = 0.0
    """Duration of the run."""
    loads: Mapping[str, LoadHistory] = field(default_factory=dict)
    """Past GPU utilization by UUID, or CPU utilization by `cpu_load_key`, in percent."""
    loads_since: float = 0.0
    """Unix seconds of the first of them."""


def rank_readings(history: History, loads: RankLoads, *, live: bool) -> RankReadings:
    """Return the readings of the ranks from the state of the run and the past load of its ranks."""
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
        live=live,
        samples=latest.gpus if latest else (),
        samples_time=latest.time if latest else 0.0,
        figures={
            uuid: GpuFigures(
                util=stats.mean("util"),
                power=stats.mean("power"),
                memory_used=stats.maxima.get("memory_used"),
                temperature=stats.maxima.get("temperature"),
            )
            for uuid, stats in history.gpus.items()
        },
        data_wait=data_wait,
        images_per_second=rate,
        seconds=history.total_seconds,
        loads=loads.histories,
        loads_since=loads.first_time,
    )


@dataclass(frozen=True)
class _Cell:
    """A cell of the table, right-aligned to `columns`. The title of a meter begins with the meter."""

    title: str
    columns: int
    text: Text
    metered: bool = False

    def aligned(self) -> Text:
        return Text(" " * max(self.columns - self.text.cell_len, 0), end="").append_text(self.text)

    def header(self) -> str:
        return self.title.ljust(self.columns) if self.metered else self.title.rjust(self.columns)


def rank_lines(readings: RankReadings, snapshot: Snapshot | None, width: int, rows: int) -> tuple[str, list[Text]]:
    """Return the title of the panel, and a header and `rows` lines per rank, none wider than `width`.

    `snapshot` names the GPUs of this host by their index and has their capacity.
    """
    started = readings.started
    if started is None:
        return "ranks", [Text("The run is starting", MUTED)]
    if not started.ranks:
        return "ranks", [Text(f"{len(started.devices)} devices; no rank info in the journal", MUTED)]
    on_cpu = set(started.devices) == {"cpu"}
    make_cells = _cpu_cells if on_cpu else _gpu_cells
    table = [make_cells(readings, snapshot, rank, width) for rank in started.ranks]
    keys = [cpu_load_key(rank.rank) if on_cpu else rank.device for rank in started.ranks]
    table_width = sum(cell.columns + len(GAP) for cell in table[0])
    graph_columns = width - table_width
    if graph_columns < MIN_GRAPH_COLUMNS or not any(key in readings.loads for key in keys):
        graph_columns = 0
    header = Text(no_wrap=True, end="")
    for cell in table[0]:
        header.append(cell.header() + GAP, MUTED)
    seconds = _graph_seconds(readings, keys, 2 * graph_columns)
    if graph_columns:
        header.append_text(
            time_axis(shown_seconds(seconds, 2 * graph_columns), graph_columns, end="now" if readings.live else "end")
        )
    lines = [header]
    for rank, cells, key in zip(started.ranks, table, keys, strict=True):
        block = [Text(no_wrap=True, end="") for _ in range(rows)]
        for cell in cells:
            block[0].append_text(cell.aligned()).append(GAP)
        if rows > 1:
            details = Text(" " * 6 + _details(readings, rank), MUTED, no_wrap=True, end="")
            details.truncate(max((table_width if graph_columns else width) - len(GAP), 0), overflow="ellipsis")
            block[1] = Text.assemble(details, no_wrap=True, end="")
        if graph_columns and key in readings.loads:
            history = readings.loads[key]
            values = history.columns(seconds, 2 * graph_columns)
            for line, graph in zip(block, history_graph(values, rows), strict=True):
                line.append(" " * (table_width - line.cell_len)).append_text(graph)
        lines += block
    for line in lines:
        line.truncate(max(width, 1), overflow="ellipsis")
    return _title(readings, on_cpu), lines


def _title(readings: RankReadings, on_cpu: bool) -> str:
    title = "ranks on the CPU" if on_cpu else "ranks"
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
    """Return more readings of a rank, and its process, for its second line."""
    if rank.device == "cpu":
        return ""  # the first line has them
    sample = next((sample for sample in readings.samples if sample.uuid == rank.device), None)
    parts = []
    if readings.live and sample is not None:
        names = {"SM": sample.sm_active, "tensor": sample.tensor_active}
        parts += [f"{name} {value:.0f}%" for name, value in names.items() if value is not None]
        if sample.sm_clock is not None:
            parts.append(f"{sample.sm_clock:.0f} MHz")
    return printable("   ".join([*parts, f"pid {rank.pid}", rank.host]))


def _gpu_cells(readings: RankReadings, snapshot: Snapshot | None, rank: RankDevice, width: int) -> list[_Cell]:
    name = gpu_name(rank.device, snapshot)
    sample = next((sample for sample in readings.samples if sample.uuid == rank.device), None)
    cells = [_Cell("rank", 4, Text(str(rank.rank), STRONG)), _Cell("GPU", max(len(name), 3), Text(name))]
    if readings.live and sample is not None and sample.state not in (None, "ok"):
        return [*cells, _Cell("", 20, Text(printable(str(sample.state)), BAD))]
    values = sample if readings.live else readings.figures.get(rank.device)
    util, memory, power, temperature = (
        getattr(values, metric, None) for metric in ("util", "memory_used", "power", "temperature")
    )
    total, limit = _capacity(rank.device, snapshot)
    bar = min(max((width - 40) // 6, MIN_METER_COLUMNS), MAX_METER_COLUMNS)
    cells.append(_metered("util", None if util is None else util / 100, _format(util, "%"), bar, 4))
    memory_text = UNKNOWN if memory is None else f"{memory / GIB:.1f}"
    memory_share = memory / total if memory is not None and total else None
    if width >= 90 and total:
        cells.append(_metered("memory", memory_share, f"{memory_text}/{total / GIB:.1f} GiB", bar, 13))
    else:
        cells.append(_Cell("memory", 9, Text(f"{memory_text} GiB")))
    if width >= 120 and limit:
        share = power / limit if power is not None else None
        cells.append(_metered("power", share, f"{_format(power)}/{limit:.0f} W", bar // 2, 9))
    else:
        cells.append(_Cell("power", 6, Text(_format(power, " W"))))
    if width >= 56:
        celsius = temperature or 0.0
        style = BAD if celsius >= HOT_CELSIUS else WARNING if celsius >= WARM_CELSIUS else ""
        cells.append(_Cell("temp", 5, Text(_format(temperature, "°"), style)))
    cells.append(_data_wait_cell(readings, rank.rank))
    throttled = sample.throttle_reasons if readings.live and sample is not None else []
    if throttled and width >= 70:
        cells.append(_Cell("slowed by", 14, Text(printable(", ".join(throttled)), WARNING)))
    return cells


def _capacity(device: str, snapshot: Snapshot | None) -> tuple[int | None, float | None]:
    """Return memory in bytes and power limit in watts of a GPU. A MIG instance has no power limit of its own."""
    for gpu in snapshot.gpus if snapshot is not None else ():
        if gpu.uuid == device:
            return gpu.value("memory_total"), gpu.value("power_limit")
        for instance in gpu.instances:
            if instance.uuid == device:
                return instance.memory_total.value, None
    return None, None


def _cpu_cells(readings: RankReadings, snapshot: Snapshot | None, rank: RankDevice, width: int) -> list[_Cell]:
    cells = [_Cell("rank", 4, Text(str(rank.rank), STRONG)), _Cell("pid", 8, Text(str(rank.pid)))]
    load = readings.loads.get(cpu_load_key(rank.rank))
    if readings.live and load is not None:
        latest = load.columns(SAMPLE_SECONDS, 1)[0]
        bar = min(max((width - 40) // 6, MIN_METER_COLUMNS), MAX_METER_COLUMNS)
        cells.append(_metered("CPU", None if latest is None else latest / 100, _format(latest, "%"), bar, 4))
    rate = readings.images_per_second
    if rate is not None and readings.started is not None:
        share = rate / max(readings.started.world_size, 1)
        cells.append(_Cell("images/s", 9, Text(f"{share:,.0f}")))
    cells.append(_data_wait_cell(readings, rank.rank))
    if width >= 70:
        host = printable(rank.host)
        cells.append(_Cell("host", max(len(host), 4), Text(host)))
    return cells


def _data_wait_cell(readings: RankReadings, rank: int) -> _Cell:
    share = readings.data_wait.get(rank)
    return _Cell("data", 4, Text(UNKNOWN if share is None else f"{share:.0%}", "" if (share or 0) < 0.1 else WARNING))


def _metered(title: str, share: float | None, text: str, bar: int, columns: int) -> _Cell:
    """Return a cell with a meter before its text."""
    line = Text.assemble(load_meter(share, bar), " ", text.rjust(columns))
    return _Cell(title, bar + 1 + columns, line, metered=True)


def _format(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"
