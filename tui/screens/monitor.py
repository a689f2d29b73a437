"""The monitor screen, shown first: the GPUs of this host, the processes on them, and the runs.

`tui.pollers` provides the data; `tui.text.gpus` and `tui.text.run_lines` format it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.gpus.snapshot import Gpu, GpuProcess, Snapshot
from engine.utils.text import pluralize, printable
from tui.keymap import MONITOR_COMMANDS, Command
from tui.palette import BAD, MUTED
from tui.pollers import HostLoad
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.signals import ProcessSignaler
from tui.text.gpu_names import gpu_key
from tui.text.gpus import (
    GIB,
    GpuAnnotations,
    gpu_lines,
    host_title,
    list_gpu_processes,
    no_driver_message,
    process_lines,
    sparkline,
)
from tui.text.run_lines import name_columns, run_line
from tui.text.runs import RunRow
from tui.widgets.lines import Lines, Row

MAX_HISTORY_SAMPLES = 32


class MonitorScreen(GputrainScreen):
    """GPUs, processes and runs; the process panel is hidden on a host without a GPU."""

    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = MONITOR_COMMANDS
    SHOWS_RUNS = True

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._busy_history: dict[str, deque[float | None]] = {}
        self._cpu_history: deque[float | None] = deque(maxlen=MAX_HISTORY_SAMPLES)
        self._last_snapshot: Snapshot | None = None
        self._processes: dict[str, GpuProcess] = {}
        self._signaler = ProcessSignaler(app)
        self._moved_focus_to_runs = False

    def compose_body(self) -> ComposeResult:
        gpus = Lines(selectable=True, id="gpus", empty_text=Text("Loading …", MUTED))
        gpus.border_title = "GPUs"
        yield gpus
        with Container(id="below"):
            processes = Lines(selectable=True, id="processes")
            processes.border_title = "Processes"
            yield processes
            runs = Lines(selectable=True, id="runs")
            runs.border_title = "Runs"
            yield runs

    def update_content(self) -> None:
        snapshot = self.gputrain_app.gpu_poller.snapshot
        self._record_history(snapshot)
        self._show_gpus(snapshot)
        self._show_processes(snapshot)
        rows = self.gputrain_app.run_list_poller.rows
        self._show_runs(rows)
        live = sum(row.live for row in rows or [])
        right = (
            f"{pluralize(live, 'run')} live   {1 / self.gputrain_app.intervals.poll_s:g} Hz "
            if rows is not None
            else ""
        )
        self.show_title(host_title(snapshot) if snapshot is not None else "", right)

    def _record_history(self, snapshot: Snapshot | None) -> None:
        if snapshot is None or snapshot is self._last_snapshot:
            return
        self._last_snapshot = snapshot
        for gpu in snapshot.gpus:
            if gpu.uuid is not None:
                self._busy_history.setdefault(gpu.uuid, deque(maxlen=MAX_HISTORY_SAMPLES)).append(gpu.value("busy"))
        if (load := self.gputrain_app.gpu_poller.host_load) is not None:
            self._cpu_history.append(load.cpu_percent)

    def _show_gpus(self, snapshot: Snapshot | None) -> None:
        lines = self.query_one("#gpus", Lines)
        problem = self.gputrain_app.gpu_poller.problem or self.gputrain_app.gpu_poller.unexpected_error
        if problem is not None:
            lines.set_texts([Text(printable(problem), BAD)])
        elif snapshot is not None and snapshot.gpus:
            marks = GpuAnnotations(
                self.gputrain_app.picked_gpu_uuids, {uuid: list(values) for uuid, values in self._busy_history.items()}
            )
            head, *texts = gpu_lines(snapshot, lines.text_width, marks)
            rows = [Row(gpu_key(gpu), text) for gpu, text in zip(snapshot.gpus, texts, strict=True)]
            lines.set_rows(rows, [head])
        elif snapshot is not None:
            if lines.has_focus and not self._moved_focus_to_runs:
                self._moved_focus_to_runs = True
                self.query_one("#runs").focus()
            lines.set_texts(self._no_gpu_lines(snapshot, lines.text_width))

    def _no_gpu_lines(self, snapshot: Snapshot, width: int) -> list[Text]:
        texts = [Text(line) for line in _wrap(no_driver_message(snapshot), width)]
        load = self.gputrain_app.gpu_poller.host_load
        return [*texts, host_line(load, list(self._cpu_history))] if load is not None else texts

    def _show_processes(self, snapshot: Snapshot | None) -> None:
        panel = self.query_one("#processes", Lines)
        panel.display = snapshot is not None and bool(snapshot.gpus)
        if snapshot is None or not panel.display:
            self._processes = {}
            return
        query = self.filter_text
        processes = [
            (gpu, process)
            for gpu, process in list_gpu_processes(snapshot)
            if not query or (process and _matches_filter(query, gpu, process))
        ]
        head, *texts = process_lines(processes, panel.text_width)
        keys = [f"{gpu.index}/{process.pid if process else ''}" for gpu, process in processes]
        self._processes = {
            key: process for key, (_, process) in zip(keys, processes, strict=True) if process is not None
        }
        self._signaler.remember(self._processes.values())
        empty = Text("No process matches the filter" if query else "No GPU processes", MUTED)
        panel.set_rows([Row(key, text) for key, text in zip(keys, texts, strict=True)], [head], empty)

    def _show_runs(self, rows: list[RunRow] | None) -> None:
        panel = self.query_one("#runs", Lines)
        problem = printable(
            self.gputrain_app.run_list_poller.problem or self.gputrain_app.run_list_poller.unexpected_error or ""
        )
        no_match = "No run matches the filter" if self.filter_text else "No runs yet; press n to start one"
        empty = Text(problem or no_match if rows is not None else "Loading …", MUTED)
        query = self.filter_text
        shown = [row for row in rows or [] if query in row.name.lower() or query in row.state]
        width = name_columns(shown, panel.text_width)
        panel.set_rows([Row(row.folder, run_line(row, width)) for row in shown], empty_text=empty)

    def action_pick(self) -> None:
        lines = self.query_one("#gpus", Lines)
        snapshot = self.gputrain_app.gpu_poller.snapshot
        if lines.selected_key is None or snapshot is None or not snapshot.gpus:
            self.gputrain_app.show_toast("No GPU to pick")
            return
        self.gputrain_app.picked_gpu_uuids ^= {lines.selected_key}
        self._show_gpus(snapshot)

    def action_open(self) -> None:
        if (key := self.query_one("#runs", Lines).selected_key) is not None:
            self.gputrain_app.open_run(key)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        if event.lines.id == "gpus":
            self.gputrain_app.open_gpu(event.key)
        elif event.lines.id == "runs":
            self.gputrain_app.open_run(event.key)
        else:
            self.action_signal()

    def action_signal(self) -> None:
        panel = self.query_one("#processes", Lines)
        self._signaler.ask(self, self._processes.get(panel.selected_key or ""))


def host_line(load: HostLoad, history: Sequence[float | None]) -> Text:
    """Format CPU load, its recent history and memory use of the host, for hosts without a GPU."""
    memory = f"memory {load.memory_used_bytes / GIB:.1f}/{load.memory_total_bytes / GIB:.1f} GiB"
    return Text(f"CPU {load.cpu_percent:3.0f}% {sparkline(history[-16:]):<16}  {memory}", no_wrap=True)


def _matches_filter(filter_text: str, gpu: Gpu, process: GpuProcess) -> bool:
    fields = (process.pid, process.user.value or "", process.command.value or "", process.run or "", gpu.index)
    return any(filter_text in str(field).lower() for field in fields)


def _wrap(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, max(width, 20))
