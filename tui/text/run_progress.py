"""Progress, bottleneck and devices of one run as lines for the run screen."""

from __future__ import annotations

import time

from rich.text import Text

from engine.runs.bottleneck import describe_efficiency
from engine.runs.folder import RunState
from engine.runs.records import GpuSample
from engine.utils.text import printable
from tui.palette import MUTED, STRONG
from tui.text.gpus import GIB
from tui.text.run_lines import state_symbol
from tui.text.runs import RunRow, RunSnapshot, format_duration
from tui.text.tables import UNKNOWN

STATE_LABELS = {RunState.RUNNING: "training"}
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 8, 40
# Three times the five seconds between `gpus` events.
GPU_STALE_SECONDS = 15.0


def progress_line(row: RunRow, width: int) -> Text:
    """Return a line with state, epoch, step, progress bar, percentage, ETA and throughput (images/s)."""
    sign, style = state_symbol(row.state)
    state = RunState(row.state)
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    line.append(f" {sign} ", style)
    line.append(STATE_LABELS.get(state, row.state), STRONG)
    share = None if not row.steps else min(row.step / row.steps, 1.0)
    tail = "" if share is None else f"  {share:4.0%}"
    if row.eta_seconds is not None and row.live and share != 1.0:
        tail += f"   ETA {format_duration(row.eta_seconds)}"
    if row.images_per_second is not None:
        tail += f"   {row.images_per_second:,.0f} images/s"
    if row.epochs and row.steps:
        per_epoch = row.steps // row.epochs
        epoch = min(row.step // max(per_epoch, 1) + (1 if row.live else 0), row.epochs)
        done = row.step - (epoch - 1) * per_epoch if row.live else row.step % max(per_epoch, 1)
        line.append(f"   epoch {epoch}/{row.epochs}")
        if row.live and width >= 80:
            line.append(f"   step {max(min(done, per_epoch), 0)}/{per_epoch}")
    room = width - line.cell_len - len(tail) - 3
    if share is not None and room >= MIN_BAR_COLUMNS:
        line.append("  ")
        line.append_text(progress_bar(share, min(room, MAX_BAR_COLUMNS)))
    line.append(tail)
    return line


def bottleneck_text(row: RunRow, width: int) -> Text:
    """Return the bottleneck, then data wait and MFU (model FLOPs utilization) if they fit; empty if all are unknown."""
    line = Text(f" {printable(row.bottleneck)}  " if row.bottleneck else "", no_wrap=True, end="")
    figures = describe_efficiency(row.data_wait, row.mfu)
    if figures and line.cell_len + 1 + len(figures) < width:
        line.append(f" {figures}", MUTED)
    line.rstrip()
    line.truncate(max(width - 1, 1), overflow="ellipsis")
    return line


def progress_bar(share: float, length: int) -> Text:
    """Return a bar of `length` cells with half-cell resolution: ━ done, ─ remaining."""
    halves = round(2 * share * length)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return Text.assemble((done, STRONG), ("─" * (length - len(done)), MUTED))


def device_lines(snapshot: RunSnapshot, width: int) -> tuple[str, list[Text]]:
    """Return a title and one line for each rank: its GPU readings, or its process if it trains on the CPU."""
    started = snapshot.started
    if started is None:
        return "Ranks", [Text("The run is starting", MUTED)]
    by_uuid = {sample.uuid: sample for sample in snapshot.gpus}
    on_cpu = set(started.devices) == {"cpu"}
    lines = []
    for rank in started.ranks:
        if on_cpu:
            lines.append(_device_line(f"rank {rank.rank}  CPU  pid {rank.pid}  {rank.host}", width))
        else:
            lines.append(
                _device_line(
                    f"rank {rank.rank}  {rank.device[:12]}  {_format_gpu_values(by_uuid.get(rank.device))}", width
                )
            )
    lines += [Text(f"{len(started.devices)} devices; no rank info in the journal", MUTED)] if not started.ranks else []
    age = time.time() - snapshot.gpus_time
    stale = f", {format_duration(age)} ago" if snapshot.gpus and snapshot.row.live and age > GPU_STALE_SECONDS else ""
    kind = "Ranks of this run, on the CPU" if on_cpu else f"GPUs of this run{stale}"
    return kind, lines


def _device_line(text: str, width: int) -> Text:
    line = Text(printable(text), no_wrap=True, end="")
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def _format_gpu_values(sample: GpuSample | None) -> str:
    if sample is None:
        return "readings unknown"
    if sample.state not in (None, "ok"):
        return sample.state
    memory = UNKNOWN if sample.memory_used is None else f"{sample.memory_used / GIB:.1f}"
    parts = [
        f"busy {_format_number(sample.busy)}%",
        f"SM {_format_number(sample.sm_active)}%",
        f"{memory} GiB",
        f"{_format_number(sample.power)} W",
        f"{_format_number(sample.temperature)}°C",
    ]
    return "  ".join(parts + sample.throttle_reasons)


def _format_number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
