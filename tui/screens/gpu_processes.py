"""Base class of the monitor and the GPU screen: a table of the processes on GPUs, and graphs of the past.

A process gets a signal and is opened only if its ID is still that of the process that was shown.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from rich.text import Text

from engine.base.errors import Problem
from engine.base.process import process_start_ticks
from engine.base.text import printable
from engine.gpus.snapshot import GpuProcess
from engine.runs.run_row import RunRow
from tui.charts.history import MAX_SPAN, MIN_SPAN
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import ChoiceDialog
from tui.screens.phrases import holder_sentence
from tui.screens.services import AppServices
from tui.screens.tables import fact_lines
from tui.screens.tables.processes import ORDERS, GpuUse, process_lines
from tui.screens.widgets.lines import KeyedRow, Lines, escape_markup
from tui.terminal.palette import MUTED

SIGNALS = (
    (signal.SIGTERM, "Request termination"),
    (signal.SIGINT, "Interrupt, same as Ctrl-C"),
    (signal.SIGHUP, "Hang up, as when its terminal closes"),
    (signal.SIGKILL, "Kill immediately; it saves nothing"),
    (signal.SIGSTOP, "Suspend"),
    (signal.SIGCONT, "Continue after SIGSTOP"),
)
MAX_TITLE_LENGTH = 60
SIMULATED = "Demo mode: this process is simulated"


def _not_here(pid: int) -> Problem:
    return Problem("", f"Process {pid} has ended, or runs in another container", code="not-found")


class GpuProcessesScreen(GputrainScreen):
    """Signals and opens the process under the cursor of `#processes`. Names it if it holds a GPU without using it."""

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._start_times: dict[int, int | None] = {}
        """When the processes in the table started, in clock ticks, as of when each was first shown."""
        self._processes: dict[str, GpuProcess] = {}
        """The processes in the table, by the keys of their rows."""
        self.process_order = next(iter(ORDERS))
        self.shows_own_processes = True
        """Whether the processes in the table are of this host."""

    @property
    def span_s(self) -> float:
        """Seconds of the past that the graphs show."""
        poller = self.gputrain_app.gpu_poller
        start = poller.loads.start_time
        past = poller.snapshot.time - start if poller.snapshot is not None and start is not None else 0.0
        return MIN_SPAN if past <= MIN_SPAN else MAX_SPAN

    def _selected_process(self) -> GpuProcess | None:
        return self._processes.get(self.query_one("#processes", Lines).selected_key or "")

    def action_sort(self) -> None:
        """Sort the processes by the next of the ORDERS."""
        orders = list(ORDERS)
        self.process_order = orders[(orders.index(self.process_order) + 1) % len(orders)]
        self.update_content()

    def show_process_rows(self, uses: Sequence[GpuUse], title: str, empty: str) -> None:
        """Show the processes in their table, which has the cursor on one of them."""
        panel = self.query_one("#processes", Lines)
        head, *texts = process_lines(uses, panel.text_width)
        keys = [f"{gpu.index}/{process.pid}/{process.instance}" if process else f"{gpu.index}" for gpu, process in uses]
        self._processes = {key: process for key, (_, process) in zip(keys, uses, strict=True) if process is not None}
        pids = [process.pid for process in self._processes.values()] if self.shows_own_processes else []
        self._start_times = {pid: self._start_times.get(pid) or process_start_ticks(pid) for pid in pids}
        panel.set_titles(title, self.holder_title())
        panel.set_rows(
            [KeyedRow(key, text) for key, text in zip(keys, texts, strict=True)],
            [head] if uses else [],
            Text(empty, MUTED),
        )

    def run_of(self, process: GpuProcess) -> RunRow | None:
        """Return the live run in this folder that a process is a rank of."""
        rows = self.gputrain_app.run_list_poller.rows or []
        return next((row for row in rows if row.live and row.name == process.run), None)

    def action_signal(self) -> None:
        """Ask which signal to send to the process. The first answer sends none, so a stray enter does no harm."""
        process, app = self._selected_process(), self.gputrain_app
        if process is None:
            app.show_toast("No process to send a signal to")
            return
        if app.demo_notice:
            app.show_toast(SIMULATED)
            return
        label = printable(f"{process.pid}  {process.user.value or '?'}  {process.command.value or '?'}")
        note = ""
        if process.run:
            note = f"Rank {process.rank} of run {process.run}: stop the run on its screen to save a checkpoint."
        rows = [KeyedRow("0", Text("Send no signal"))]
        lines = fact_lines({number.name: description for number, description in SIGNALS})
        rows += [KeyedRow(str(int(number)), Text(line)) for (number, _), line in zip(SIGNALS, lines, strict=True)]
        start_time = self._start_times.get(process.pid)

        def send(number: str | None) -> None:
            if number is not None and int(number):
                self.send_signal(process.pid, start_time, int(number))

        title = f"Send a signal to {label}"[:MAX_TITLE_LENGTH]
        self.app.push_screen(ChoiceDialog(title, rows, printable(note)), send)

    def send_signal(self, pid: int, expected_start_time: int | None, signum: int) -> None:
        """Send the signal to a process that started at `expected_start_time`, and report the result."""
        name, app = signal.Signals(signum).name, self.gputrain_app
        # The PID may have been reused while the dialog was open.
        if expected_start_time is None or process_start_ticks(pid) != expected_start_time:
            app.show_toast(_not_here(pid))
            return
        try:
            os.kill(pid, signum)
        except OSError as error:
            reason = f"{name} could not be sent to process {pid}: {error.strerror}"
            app.show_toast(Problem("", reason, code="access-denied"))
            return
        app.show_toast(f"{name} sent to process {pid}")

    def open_process(self, process: GpuProcess) -> None:
        """Open the run of a process, or the process itself. A thread looks for a run of gputrain."""
        from engine.watch.process import ProcessId, read_tree

        app, pid, start_time = self.gputrain_app, process.pid, self._start_times.get(process.pid)
        if (run := self.run_of(process)) is not None:
            app.open_run(run.folder)
            return
        if app.demo_notice:
            app.show_toast(SIMULATED)
            return
        # The PID may be that of another process: reused, or of another container.
        if start_time is None or process_start_ticks(pid) != start_time:
            app.show_toast(_not_here(pid))
            return

        def look() -> None:
            process_id = ProcessId(pid, start_time)
            own_run, call = read_tree(process_id).own_run, self.app.call_from_thread
            if own_run is not None:
                call(app.open_run, str(own_run))
            else:
                call(app.open_process, process_id)

        self.run_worker(look, thread=True, group="process", exclusive=True)

    def holder_title(self) -> str:
        """Return the sentence about the process under the cursor, as markup."""
        process = self._selected_process()
        sentence = "" if process is None else holder_sentence(process)
        return "" if process is None or not sentence else f"[$warning]pid {process.pid} {escape_markup(sentence)}[/]"

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if event.lines.id == "processes":
            event.lines.set_titles(str(event.lines.border_title or ""), self.holder_title())
        self.update_keys()
