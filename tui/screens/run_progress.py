"""Progress, diagnosis and failure of one run as lines for the run screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from engine.gpus.snapshot import Snapshot
from engine.runs.bottleneck import describe_efficiency
from engine.runs.folder import RunState
from engine.runs.metrics import METRICS, format_known
from engine.runs.run_row import RunRow
from engine.show.table import Align, pad
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from engine.utils.units import format_duration, format_share
from tui.charts.meter import meter
from tui.palette import BAD, GOOD, MUTED, STRONG, WARNING, series_style
from tui.phrases import FAILED_STATES, gpu_name, state_symbol
from tui.pollers.runs import RunSnapshot

if TYPE_CHECKING:
    from engine.runs.events import RankFailed

MIN_GAP_COLUMNS = 3
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 8, 40
MAX_FAILED_RANKS, MAX_FAILURE_LINES = 2, 8


def progress_line(row: RunRow, width: int) -> Text:
    """Return a line with phase, epoch, step, progress bar, ETA and throughput; of an ended run, what it reached."""
    sign, style = state_symbol(row.shown_state)
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    line.append(f" {sign} ", style)
    line.append(phase_label(row), STRONG)
    if row.live:
        _append_progress(line, row, width)
    else:
        _append_results(line, row, width)
    return line


def phase_label(row: RunRow) -> str:
    """Return what the run does: its state, or the phase of its ranks while they run."""
    return (row.record.phase or "training") if row.state == RunState.RUNNING else row.shown_state


def _append_progress(line: Text, row: RunRow, width: int) -> None:
    values, count = row.record.values, row.record.count
    step, steps, epochs = count("step"), count("steps"), count("total_epochs")
    share = min(step / steps, 1.0) if steps else None
    tail = "" if share is None else f" {pad(format_share(share), 4, Align.RIGHT)}"
    if (eta_s := values.get("eta_seconds")) is not None and share != 1.0:
        tail += f"   ETA {format_duration(eta_s)}"
    if epochs and steps:
        per_epoch = max(steps // epochs, 1)
        epoch = min(max(row.record.current_epoch, 1), epochs)
        line.append(f"   epoch {epoch}/{epochs}")
        if width >= 80:
            line.append(f"   step {max(min(step - (epoch - 1) * per_epoch, per_epoch), 0)}/{per_epoch}")
    rate = format_known("rate_now", values.get("rate_now"))
    rate = rate and f"   {rate} images/s"
    room = width - line.cell_len - len(tail) - 4
    if room - len(rate) >= MIN_BAR_COLUMNS:
        tail, room = tail + rate, room - len(rate)
    if share is not None and room >= MIN_BAR_COLUMNS:
        line.append("  ")
        line.append_text(meter(share, min(room, MAX_BAR_COLUMNS), series_style(1)))
    line.append(tail)


def _append_results(line: Text, row: RunRow, width: int) -> None:
    values, done, planned = row.record.values, row.record.count("epochs"), row.record.count("total_epochs")
    parts = [f"epoch {done}/{planned}" if planned else ""]
    if planned and done == planned:
        parts = [pluralize(planned, "epoch")]
    parts.append(f"in {format_duration(row.record.seconds)}" if row.record.seconds else "")
    line.append("   " + " ".join(filter(None, parts)))
    if best := format_known("best_val_accuracy", values.get("best_val_accuracy")):
        line.append(f"   {METRICS['best_val_accuracy'].label} ").append(best, GOOD)
        line.append(f" @{values['best_epoch']}" if "best_epoch" in values else "")
    last = format_known("val_accuracy", values.get("val_accuracy"))
    rate = format_known("images_per_second", values.get("images_per_second") or None)
    for text in (last and f"   {METRICS['val_accuracy'].label} {last}", rate and f"   {rate} images/s"):
        if line.cell_len + len(text) < width:
            line.append(text)


def bottleneck_text(row: RunRow, width: int) -> Text:
    """Return the bottleneck, then data wait, gradient norm and MFU at the right; empty if all are unknown or if the run
    failed."""
    line = Text(no_wrap=True, end="")
    if RunState(row.state) in FAILED_STATES:
        return line
    values = row.record.values
    figures = describe_efficiency(values.get("data_wait"), values.get("mfu"))
    grad_norm = format_known("grad_norm", values.get("grad_norm"))
    if grad_norm and row.live:
        figures = "   ".join(filter(None, [figures, f"{METRICS['grad_norm'].label} {grad_norm}"]))
    if row.record.bottleneck:
        line.append(f" {printable(row.record.bottleneck.message)}")
    room = width - line.cell_len - len(figures) - 1
    if figures and room >= MIN_GAP_COLUMNS:
        line.append(" " * (room if row.record.bottleneck else 1)).append(figures, MUTED)
    line.truncate(max(width - 1, 1), overflow="ellipsis")
    return line


def state_lines(
    snapshot: RunSnapshot, error: Problem | None, gpus: Snapshot | None, width: int, console: Console
) -> list[Text]:
    """Return the lines below the progress: why the run failed, or what else the user should know. `error` is that of
    its poller."""
    row = snapshot.row
    if error is None and not snapshot.folder_missing and not row.foreign and row.state in FAILED_STATES:
        return failure_lines(snapshot, gpus, width, console)
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    if error is not None:
        line.append(f" {printable(str(error))}", BAD)
    elif snapshot.folder_missing:
        line.append(" The run folder was deleted; this is the last known state", BAD)
    elif row.foreign:
        line.append(f" {printable(f'This run {row.foreign}')}", WARNING)
    elif row.message and row.state != RunState.FINISHED:
        is_problem = row.live and row.state != RunState.WAITING
        line.append(f" {printable(row.message)}", WARNING if is_problem else MUTED)
    lines = [line] if line.plain else []
    return [*lines, *_learning_lines(row)] if not snapshot.folder_missing else lines


def _learning_lines(row: RunRow) -> list[Text]:
    """Return what keeps the run from learning well; nothing if it learns."""
    learning = row.record.learning
    if learning is None:
        return []
    return [Text(f" {printable(learning.message)}", WARNING, no_wrap=True, overflow="ellipsis", end="")]


def failure_lines(snapshot: RunSnapshot, gpus: Snapshot | None, width: int, console: Console) -> list[Text]:
    """Return why a run failed or crashed, wrapped: rank, host, GPU and error of each failed rank, and what to do."""
    message, lines = snapshot.row.message, list[Text]()
    for failure in snapshot.failures[:MAX_FAILED_RANKS]:
        lines.append(Text.assemble((_failed_rank(failure, snapshot, gpus), BAD), f"  {printable(failure.cause)}"))
        # The message repeats the cause, and says after it what to do.
        if failure.cause and failure.cause in message:
            message = message.partition(failure.cause)[2].lstrip(" ;.")
    if message:
        lines.append(Text(printable(message), STRONG if lines else BAD))
    wrapped = [part for line in lines for part in line.wrap(console, max(width - 3, 20))][:MAX_FAILURE_LINES]
    return [Text.assemble((" ┃ ", BAD), part, no_wrap=True, end="") for part in wrapped]


def _failed_rank(failure: RankFailed, snapshot: RunSnapshot, gpus: Snapshot | None) -> str:
    started = snapshot.ranks.started
    hosts: Sequence[str] = [rank.host for rank in started.ranks if rank.rank == failure.rank] if started else ()
    device = "CPU" if failure.device == "cpu" else f"GPU {gpu_name(failure.device, gpus)}" if failure.device else ""
    return printable(" · ".join(filter(None, [f"rank {failure.rank}", *hosts[:1], device])))
