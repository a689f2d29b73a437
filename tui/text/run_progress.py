"""How far a run is, and what its devices do, as lines."""

from __future__ import annotations

import time

from rich.text import Text

from engine.runs.bottleneck import figures_in_words
from engine.runs.folder import State
from engine.runs.records import GpuSample
from engine.utils.text import printable
from tui.text.gpus import GIB
from tui.text.palette import MUTED, STRONG
from tui.text.run_lines import sign_of
from tui.text.runs import RunNow, RunRow, clock
from tui.text.tables import NONE

WORDS = {State.RUNNING: "training"}
LEAST_BAR, MOST_BAR = 8, 40
# Events about the GPUs come every five seconds.
STALE_SECONDS = 15.0


def progress_line(row: RunRow, width: int) -> Text:
    """State, epoch, step within it, a bar, the share that is done, the time left, images a second."""
    sign, style = sign_of(row.state)
    state = State(row.state)
    line = Text(no_wrap=True, overflow="ellipsis", end="")
    line.append(f" {sign} ", style)
    line.append(WORDS.get(state, row.state), STRONG)
    share = None if not row.steps else min(row.step / row.steps, 1.0)
    tail = "" if share is None else f"  {share:4.0%}"
    if row.eta_seconds is not None and row.live and share != 1.0:
        tail += f"   ETA {clock(row.eta_seconds)}"
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
    if share is not None and room >= LEAST_BAR:
        line.append("  ")
        line.append_text(bar(share, min(room, MOST_BAR)))
    line.append(tail)
    return line


def limit_line(row: RunRow, width: int) -> Text:
    """What limits the run, and where there is room the share of its time that it waits for data and the model FLOPs
    utilization; nothing where none of it is known."""
    line = Text(f" {printable(row.verdict)}  " if row.verdict else "", no_wrap=True, end="")
    figures = figures_in_words(row.data_wait, row.mfu)
    if figures and line.cell_len + 1 + len(figures) < width:
        line.append(f" {figures}", MUTED)
    line.rstrip()
    line.truncate(max(width - 1, 1), overflow="ellipsis")
    return line


def bar(share: float, length: int) -> Text:
    """The wireframe's own: ━ for what is done, ─ for the rest."""
    halves = round(2 * share * length)
    full, half = divmod(halves, 2)
    done = "━" * full + ("╸" if half else "")
    return Text.assemble((done, STRONG), ("─" * (length - len(done)), MUTED))


def device_lines(now: RunNow, width: int) -> tuple[str, list[Text]]:
    """A title, and a line for each GPU that the run has, or for each rank where it trains on the CPU."""
    started = now.started
    if started is None:
        return "ranks", [Text("not known yet", MUTED)]
    by_uuid = {sample.uuid: sample for sample in now.gpus}
    on_cpu = started.backend == "gloo"
    lines = []
    for one in started.ranks:
        if on_cpu:
            lines.append(_line(f"rank {one.rank}  CPU  pid {one.pid}  {one.host}", width))
        else:
            lines.append(_line(f"rank {one.rank}  {one.device[:12]}  {_does(by_uuid.get(one.device))}", width))
    lines += [Text(f"{len(started.devices)} devices, not told which", MUTED)] if not started.ranks else []
    age = time.time() - now.gpus_time
    stale = f", {clock(age)} ago" if now.gpus and now.row.live and age > STALE_SECONDS else ""
    kind = "ranks of this run, on the CPU" if on_cpu else f"GPUs of this run{stale}"
    return kind, lines


def _line(text: str, width: int) -> Text:
    line = Text(printable(text), no_wrap=True, end="")
    line.truncate(max(width, 1), overflow="ellipsis")
    return line


def _does(sample: GpuSample | None) -> str:
    if sample is None:
        return "nothing told of it yet"
    if sample.state not in (None, "ok"):
        return sample.state
    memory = NONE if sample.memory_used is None else f"{sample.memory_used / GIB:.1f}"
    parts = [
        f"busy {_number(sample.busy)}%",
        f"SM {_number(sample.sm_active)}%",
        f"{memory} GiB",
        f"{_number(sample.power)} W",
        f"{_number(sample.temperature)}°C",
    ]
    return "  ".join(parts + sample.throttle_reasons)


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"
