"""The screen of a process: the past of its load, its tree, its GPUs, how it was started, its log, and the runs that it
writes. Nothing is signaled.

If the process writes one run, the screen of that run opens above this one, with a line about the process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, Grid

from engine.base.text import printable
from engine.watch.process import ProcessId
from tui.charts.history import MAX_SPAN, MIN_SPAN, LoadHistory, LoadPlot, shown_seconds
from tui.screens.base import GputrainScreen
from tui.screens.host_panel import load_text
from tui.screens.keymap import PROCESS_KEYS, Key
from tui.screens.pollers.process import ProcessPoller, ProcessReading
from tui.screens.services import AppServices
from tui.screens.tables.log_lines import fit_bar, output_line
from tui.screens.tables.process import GpuUses, LoadScale, detail_lines, gpu_lines, hidden_text, run_lines, tree_lines
from tui.screens.widgets.lines import KeyedRow, Lines, escape_markup
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import MUTED


class ProcessScreen(GputrainScreen):
    """One process and its descendants, by ID and start: an ID that is used again is another process."""

    CSS_PATH = "process.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = PROCESS_KEYS

    def __init__(self, app: AppServices, process: ProcessId, *, opens_run: bool = True) -> None:
        """Opens the run of the process, unless it is shown below with `opens_run=False`."""
        super().__init__(app)
        self._process = process
        self.poller = self.follow(ProcessPoller(lambda: process, app.intervals.poll_s))
        self.poller.on_poll = self._record
        self._past = {key: LoadHistory() for key in ("cpu", "memory", "gpu_memory")}
        self._opens_run, self._has_opened = opens_run, not opens_run
        # A low terminal has room for what the status line does not say.
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (24, "-medium"), (30, "-high")]

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="status")
        with Grid(id="graphs"):
            for key in self._past:
                yield Lines(id=key, focusable=False)
        yield Lines(id="tree", title="Processes")
        yield Lines(id="uses", title="GPUs", focusable=False)
        yield Lines(id="written", title="Metrics that it writes", selectable=True)
        with Container(id="bottom"):
            yield Lines(id="details", title="Environment and command")
            yield Lines(id="output")

    def on_mount(self) -> None:
        for panel in () if self._opens_run else ("#written", "#output"):
            self.query_one(panel).display = False
        self.query_one("#written" if self._opens_run else "#tree").focus()

    @property
    def has_content(self) -> bool:
        return self.poller.has_result()

    def update_content(self) -> None:
        reading = self.poller.latest
        self.show_title(f"process {self._process.pid}", right=load_text(self.gputrain_app.host_poller.value))
        if reading is None:
            return
        self._open_only_run(reading)
        snapshot = self.gputrain_app.gpu_poller.snapshot
        self.show_line("#status", reading.status_line(snapshot))
        uses = reading.gpu_uses(snapshot)
        self._show_graphs(reading.loads(snapshot), uses)
        tree = self.query_one("#tree", Lines)
        head, *lines = tree_lines(reading.tree, reading.cpu_percent, uses, tree.text_width)
        hidden = hidden_text(reading.tree)
        tree.set_texts([*lines, *([hidden] if hidden is not None else [])], [head])
        panel = self.query_one("#uses", Lines)
        panel.display = bool(uses) and self.has_class("-high")
        panel.set_texts(gpu_lines(uses))
        if reading.details is not None:
            panel = self.query_one("#details", Lines)
            panel.set_texts(detail_lines(reading.details, reading.tree, panel.text_width))
        written = self.query_one("#written", Lines)
        texts = run_lines(reading.runs, reading.ended_at, written.text_width)
        searching = "It writes no metrics that are known" if reading.has_searched else "Looking for its metrics …"
        written.set_rows(
            [KeyedRow(str(index), text) for index, text in enumerate(texts)], empty_text=Text(searching, MUTED)
        )
        output = self.query_one("#output", Lines)
        name = printable(str(reading.log)) if reading.log is not None else "its output goes to no file"
        output.set_titles(f"Log  {escape_markup(name)}")
        tail = reading.log_lines[-max(output.size.height, 1) :]
        output.set_texts([fit_bar(output_line(line), output.text_width) for line in tail])

    def _record(self) -> None:
        """Keep what the process uses now. Called in the thread of the poller."""
        reading = self.poller.latest
        if reading is not None and reading.ended_at is None:
            for key, value in reading.loads(self.gputrain_app.gpu_poller.snapshot).items():
                self._past[key].add(time.time(), value)

    def _show_graphs(self, loads: Mapping[str, float | None], uses: GpuUses) -> None:
        now, graphs = time.time(), self.query_one("#graphs")
        graphs.styles.grid_size_columns = 3 if uses else 2
        for key, past in self._past.items():
            panel = self.query_one(f"#{key}", Lines)
            panel.display = bool(uses) or key != "gpu_memory"
            plot = LoadPlot.fit(panel.text_width, panel.size.height)
            seconds = MIN_SPAN if now - (past.start_time or now) <= MIN_SPAN else MAX_SPAN
            values = past.columns(seconds, plot.values, now)
            scale = LoadScale.fit(key, loads[key], values, uses)
            panel.set_titles(scale.title)
            panel.set_texts(plot.lines(scale.percent(values), shown_seconds(seconds, plot.values), scale.label))

    def _open_only_run(self, reading: ProcessReading) -> None:
        """Open the run of the process, at most once."""
        if self._has_opened or self.app.screen is not self:
            return
        if reading.tree.own_run is not None:
            self._has_opened = True
            self.gputrain_app.open_run(str(reading.tree.own_run))
        elif len(reading.runs) == 1:
            self._has_opened = True
            self.gputrain_app.open_foreign_run(reading.runs[0], self.poller)
        elif reading.runs:
            self._has_opened = True

    def is_available(self, action: str) -> bool:
        return action != "open" or (self._opens_run and self.query_one("#written", Lines).selected_key is not None)

    def action_open(self) -> None:
        """Open the run under the cursor."""
        key, reading = self.query_one("#written", Lines).selected_key, self.poller.latest
        if key is not None and reading is not None and int(key) < len(reading.runs):
            self.gputrain_app.open_foreign_run(reading.runs[int(key)], self.poller)
