"""Base class of the monitor and the GPU screen: a table of the processes on GPUs, and graphs of the past."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text
from textual.screen import Screen

from engine.base.errors import Problem
from engine.base.text import printable
from engine.gpus.snapshot import GpuProcess
from engine.runs.run_row import RunRow
from tui.charts.history import MAX_SPAN, MIN_SPAN
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import ChoiceDialog
from tui.screens.phrases import holder_sentence
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


class ProcessSignaler:
    """Asks which signal to send to a process, and sends it if the PID has not been reused since it was shown.

    Opens the screen of such a process, too.
    """

    def __init__(self, app: AppServices) -> None:
        self._app = app
        self._start_times: dict[int, int | None] = {}

    def remember(self, processes: Iterable[GpuProcess]) -> None:
        """Keep the start times of the processes that the screen shows, as of when each was first shown."""
        self._start_times = {
            process.pid: self._start_times.get(process.pid) or process_start_time(process.pid) for process in processes
        }

    def ask(self, screen: Screen[None], process: GpuProcess | None) -> None:
        """Let the user choose a signal for `process`. The first answer sends none, so a stray enter does no harm."""
        if process is None:
            self._app.show_toast("No process to send a signal to")
            return
        if self._app.demo_notice:
            self._app.show_toast(SIMULATED)
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
                self.send(process.pid, start_time, int(number))

        title = f"Send a signal to {label}"[:MAX_TITLE_LENGTH]
        screen.app.push_screen(ChoiceDialog(title, rows, printable(note)), send)

    def send(self, pid: int, expected_start_time: int | None, signum: int) -> None:
        """Send the signal to a process that started at `expected_start_time`, and report the result."""
        name = signal.Signals(signum).name
        # The PID may have been reused while the dialog was open.
        if expected_start_time is None or process_start_time(pid) != expected_start_time:
            self._app.show_toast(_not_here(pid))
            return
        try:
            os.kill(pid, signum)
        except OSError as error:
            self._app.show_toast(
                Problem("", f"{name} could not be sent to process {pid}: {error.strerror}", code="access-denied")
            )
            return
        self._app.show_toast(f"{name} sent to process {pid}")

    def open(self, screen: Screen[Any], pid: int) -> None:
        """Open the screen of a process, or that of its run of gputrain. A thread looks for the run."""
        from engine.watch.process import ProcessId, read_tree

        app, start_time = self._app, self._start_times.get(pid)
        if app.demo_notice:
            app.show_toast(SIMULATED)
            return
        # The PID may be that of another process: reused, or of another container.
        if start_time is None or process_start_time(pid) != start_time:
            app.show_toast(_not_here(pid))
            return

        def look() -> None:
            process = ProcessId(pid, start_time)
            own_run, call = read_tree(process).own_run, screen.app.call_from_thread
            if own_run is not None:
                call(app.open_run, str(own_run))
            else:
                call(app.open_process, process)

        screen.run_worker(look, thread=True, group="process", exclusive=True)


def _not_here(pid: int) -> Problem:
    return Problem("", f"Process {pid} has ended, or runs in another container", code="not-found")


def process_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None if there is no such process."""
    # Without psutil, whose import would delay the first frame.
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # Field 22, starttime (proc_pid_stat(5)). The command before field 3 is in parentheses and may contain any byte.
    return int(status.rpartition(b")")[2].split()[22 - 3])


class GpuProcessesScreen(GputrainScreen):
    """Names the process under the cursor of `#processes` if it holds a GPU without using it."""

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._signaler = ProcessSignaler(app)
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
        self._signaler.remember(self._processes.values() if self.shows_own_processes else ())
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

    def open_process(self, process: GpuProcess) -> None:
        """Open the run of a process, or the process itself."""
        if (run := self.run_of(process)) is not None:
            self.gputrain_app.open_run(run.folder)
        else:
            self._signaler.open(self, process.pid)

    def holder_title(self) -> str:
        """Return the sentence about the process under the cursor, as markup."""
        process = self._selected_process()
        sentence = "" if process is None else holder_sentence(process)
        return "" if process is None or not sentence else f"[$warning]pid {process.pid} {escape_markup(sentence)}[/]"

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if event.lines.id == "processes":
            event.lines.set_titles(str(event.lines.border_title or ""), self.holder_title())
        self.update_keys()
