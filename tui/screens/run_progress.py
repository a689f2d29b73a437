"""The lines below the title of the screen of a run: progress, what limits or writes it, and what else is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from engine.base.text import pluralize, printable
from engine.base.units import (
    UNKNOWN,
    format_age,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_share,
)
from engine.gpus.snapshot import Snapshot
from engine.jobs.launch.detached import LaunchedRun
from engine.report.table import Align, pad
from engine.runs.bottleneck import describe_efficiency
from engine.runs.folder import RunState
from engine.runs.metrics import METRICS, format_known, format_metric
from engine.runs.monitor import record_monitor
from engine.runs.run_row import RunRow
from engine.watch.activity import Activity, activity_text
from tui.charts.meter import meter
from tui.screens.phrases import FAILED_STATES, gpu_name, keyed, state_symbol
from tui.screens.pollers.process import ProcessReading
from tui.screens.pollers.run import RunPoller, RunSnapshot
from tui.screens.tables import wrap_text
from tui.terminal.palette import BAD, GOOD, MUTED, STRONG, WARNING, series_style

if TYPE_CHECKING:
    from engine.runs.events import RankFailed

MIN_GAP_COLUMNS = 3
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 8, 40
MAX_FAILED_RANKS, MAX_FAILURE_LINES = 2, 8
# The supervisor and the keeper, which start the command.
COMMAND_DEPTH = 2


@dataclass(frozen=True)
class RunStatus:
    """What the lines are about: a run, its process if one is known, the GPUs of this host. `has_ranks`: whether
    a panel shows the GPUs of the run."""

    poller: RunPoller
    process: ProcessReading | None
    gpus: Snapshot | None
    width: int
    has_ranks: bool = False


def launch_lines(launched: LaunchedRun, status: RunStatus) -> tuple[list[Text], list[Text], list[Text]]:
    """Return what a run that is starting does, or that it did not start, and what is to be known of its start."""
    code, folder = launched.exit_code, launched.claimed
    if code is None:
        begins = "loading torch" if status.poller.is_training and not launched.has_command else "starting the command"
        doing = "checking the config and the GPUs" if folder is None else begins
        seconds = max(time.time() - launched.launched_at, 0.0)
        state, name = RunState.STARTING, "starting"
        note = f"{doing}, {seconds:.0f} s; the run continues when you leave this screen"
    elif code == 0:
        state, name, note = RunState.FINISHED, "nothing left to do", "press esc to go back"
    else:
        state, name, note = RunState.FAILED, "not started", "nothing was changed; press esc to go back and correct it"
    sign, style = state_symbol(state)
    line = Text.assemble((f" {sign} ", style), (name, STRONG), (f"   {note}", MUTED), no_wrap=True, end="")
    line.truncate(status.width, overflow="ellipsis")
    warning = [] if launched.warning is None else wrap_text(Text(f" {launched.warning}", WARNING), status.width)
    return [line], [], warning


def status_lines(status: RunStatus, console: Console) -> tuple[list[Text], list[Text], list[Text]]:
    """Return the lines on the progress of a run, on what limits or writes it, and on what else is to be known."""
    poller, snapshot = status.poller, status.poller.latest
    if poller.folder is None:
        process = [] if status.process is None else [status.process.status_line(status.gpus)]
        return [_foreign_line(status)], process, _foreign_message(poller)
    if snapshot is None:
        return [_line("Loading …", MUTED)], [], []
    row, message = snapshot.row, _state_lines(status, snapshot, console)
    if row.record.command or not poller.is_training:
        message += [_line(problem, WARNING) for problem in poller.reader.problems]
        command = [_line(f"$ {row.record.command}", MUTED)] if row.record.command else []
        return [_command_line(status, snapshot)], command, message
    if not message and row.state == RunState.STARTING:
        message = [_line("Starting the ranks", MUTED)]
    elif not message and not poller.caught_up:
        steps = int(poller.reader.curves.last_x("step"))
        message = [_line(f"Reading the journal: {steps:,} steps so far", WARNING)]
    bottleneck = bottleneck_text(row, status.width)
    return [progress_line(row, status.width)], [bottleneck] if bottleneck.plain else [], message


def _reading_text(status: RunStatus) -> Text:
    """Return how much of the logs of another program has been read, and how far the run is."""
    poller, curves = status.poller, status.poller.reader.curves
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    if not poller.caught_up:
        line.append(f" {min(poller.reader.share, 0.99):.0%} read", WARNING)
    if not curves.num_points:
        return line.append(" No values yet" if poller.caught_up else " Reading", MUTED)
    return line.append(f" step {format_count(curves.last_x('step'))}   {pluralize(len(curves.names), 'metric')}")


def _foreign_line(status: RunStatus) -> Text:
    """Return how far a run of another program is, and when it was last written."""
    line, poller = _reading_text(status), status.poller
    if poller.changed_at:
        activity = poller.activity(None if status.process is None else status.process.ended_at)
        line.append(f"   {activity_text(activity, poller.changed_at)}")
        if activity is not Activity.QUIET:
            line.append(f"   changed {format_age(max(time.time() - poller.changed_at, 0))} ago", MUTED)
    return line.append(f"   {', '.join(poller.run.formats)}", MUTED)


def _foreign_message(poller: RunPoller) -> list[Text]:
    """Return what of a run of another program cannot be read, in one line."""
    parts = [(printable(problem), WARNING) for problem in poller.reader.problems]
    if poller.problem is not None:
        parts.insert(0, (printable(str(poller.problem)), BAD))
    elif poller.caught_up and not poller.changed_at:
        parts.insert(0, ("The files of the run were deleted; this is the last known state", BAD))
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    for text, style in parts:
        line.append(f" {text}  ", style)
    return [line] if parts else []


def _command_line(status: RunStatus, snapshot: RunSnapshot) -> Text:
    """Return the state of the run of a command, how far it is, and what it uses of the host."""
    row, poller, process = snapshot.row, status.poller, status.process
    sign, style = state_symbol(row.shown_state)
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    line.append(f" {sign} ", style).append(row.shown_state, STRONG)
    seconds = row.age_seconds if row.state in (RunState.RUNNING, RunState.STOPPING) else row.record.seconds
    if seconds:
        line.append(f" {'for' if row.live else 'after'} {format_duration(seconds)}")
    if row.live or poller.reader.curves.num_points or not poller.caught_up:
        line.append("  ").append_text(_reading_text(status))
    if row.live and process is not None:
        _append_use(line, process)
    if row.live and not status.has_ranks:
        gpus = status.gpus.gpus if status.gpus is not None else ()
        for device in snapshot.ranks.gpu_devices:
            use = next((gpu.value("util") for gpu in gpus if gpu.uuid == device), None)
            line.append(f"   GPU {gpu_name(device, status.gpus)} ", MUTED)
            line.append(UNKNOWN if use is None else format_percent(use))
    return line


def _append_use(line: Text, reading: ProcessReading) -> None:
    """Append what the processes of a command use of the host."""
    processes = [process for process in reading.tree.processes if process.depth >= COMMAND_DEPTH]
    known = [reading.cpu_percent[process.id.pid] for process in processes if process.id.pid in reading.cpu_percent]
    if known:
        line.append("   CPU ", MUTED).append(format_percent(sum(known)))
    if processes:
        line.append("   memory ", MUTED).append(format_bytes(sum(process.memory_bytes for process in processes)))


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
    done = "" if share is None else f" {pad(format_share(share), 4, Align.RIGHT)}"
    eta_s = values.get("eta_seconds") if share != 1.0 else None
    tail = "" if eta_s is None else f"   ETA {format_duration(eta_s)}"
    if epochs and steps:
        per_epoch = max(steps // epochs, 1)
        epoch = min(max(row.record.current_epoch, 1), epochs)
        line.append(f"   epoch {epoch}/{epochs}")
        if width >= 80:
            line.append(f"   step {max(min(step - (epoch - 1) * per_epoch, per_epoch), 0)}/{per_epoch}")
    rate = format_known("rate_now", values.get("rate_now"))
    rate = rate and f"   {rate} {METRICS['rate_now'].label}"
    room = width - line.cell_len - len(done + tail) - 4
    elapsed = f"   for {format_duration(row.age_seconds)}" if row.age_seconds else ""
    for before, after in ((elapsed, ""), ("", rate)):
        if room - len(before + after) >= MIN_BAR_COLUMNS:
            tail, room = before + tail + after, room - len(before + after)
    if share is not None and room >= MIN_BAR_COLUMNS:
        line.append("  ")
        line.append_text(meter(share, min(room, MAX_BAR_COLUMNS), series_style(1)))
    line.append(done + tail)


def _append_results(line: Text, row: RunRow, width: int) -> None:
    values, done, planned = row.record.values, row.record.count("epochs"), row.record.count("total_epochs")
    parts = [f"epoch {done}/{planned}" if planned else ""]
    if planned and done == planned:
        parts = [pluralize(planned, "epoch")]
    parts.append(f"in {format_known('seconds', row.record.seconds)}" if row.record.seconds else "")
    line.append("   " + " ".join(filter(None, parts)))
    monitor = record_monitor(row.record)
    if (value := monitor.of_run(row.record)) is not None:
        line.append(f"   {printable(monitor.label)} ").append(format_metric(monitor, value), GOOD)
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


def _state_lines(status: RunStatus, snapshot: RunSnapshot, console: Console) -> list[Text]:
    """Return why a run of gputrain failed, or what else the user should know."""
    row, error = snapshot.row, status.poller.problem
    if error is None and not snapshot.folder_missing and not row.foreign and row.state in FAILED_STATES:
        return failure_lines(snapshot, status.gpus, status.width, console)
    notes: list[tuple[str, str]] = []
    if error is not None:
        notes.append((str(error), BAD))
    elif snapshot.folder_missing:
        return [_line("The run folder was deleted; this is the last known state", BAD)]
    elif row.foreign:
        notes.append((f"This run {row.foreign}", WARNING))
    elif row.message and row.state != RunState.FINISHED:
        is_problem = row.live and row.state != RunState.WAITING
        notes.append((row.message, WARNING if is_problem else MUTED))
    wrapped = [part for text, style in notes for part in wrap_text(Text(keyed(text), style), status.width - 2)]
    return [Text.assemble(" ", part, no_wrap=True, end="") for part in wrapped[:MAX_FAILURE_LINES]]


def _line(text: str, style: str) -> Text:
    return Text(f" {printable(text)}", style, no_wrap=True, overflow="ellipsis", end="")


def failure_lines(snapshot: RunSnapshot, gpus: Snapshot | None, width: int, console: Console) -> list[Text]:
    """Return why a run failed or crashed, wrapped: rank, host, GPU and error of each failed rank, and what to do."""
    message, lines = snapshot.row.message, list[Text]()
    for failure in snapshot.failures[:MAX_FAILED_RANKS]:
        lines.append(Text.assemble((_failed_rank(failure, snapshot, gpus), BAD), f"  {printable(failure.cause)}"))
        # The message repeats the cause, and says after it what to do.
        if failure.cause and failure.cause in message:
            message = message.partition(failure.cause)[2].lstrip(" ;.")
    if message:
        lines.append(Text(keyed(message), STRONG if lines else BAD))
    wrapped = [part for line in lines for part in line.wrap(console, max(width - 3, 20))][:MAX_FAILURE_LINES]
    return [Text.assemble((" ┃ ", BAD), part, no_wrap=True, end="") for part in wrapped]


def _failed_rank(failure: RankFailed, snapshot: RunSnapshot, gpus: Snapshot | None) -> str:
    started = snapshot.ranks.started
    hosts: Sequence[str] = [rank.host for rank in started.ranks if rank.rank == failure.rank] if started else ()
    device = "CPU" if failure.device == "cpu" else f"GPU {gpu_name(failure.device, gpus)}" if failure.device else ""
    return printable(" · ".join(filter(None, [f"rank {failure.rank}", *hosts[:1], device])))
