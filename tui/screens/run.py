"""The screen of one run: progress, bottleneck, charts, GPUs, log, and the control requests that it sends.

`tui.pollers.runs` reads the journal; `tui.charts` turns its events into curves.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.control import RequestName
from engine.runs.curves import Curves
from engine.runs.folder import RunFolder, RunState
from engine.runs.journal_source import MAX_STEP_COLUMNS, JournalPoints
from engine.show.charts import run_charts
from engine.utils.errors import Problem
from engine.utils.text import printable
from tui.charts.view import best_note, curves_for, data_notes
from tui.keymap import RUN_KEYS, Key
from tui.palette import MUTED, WARNING
from tui.pollers.runs import RunPoller, RunSnapshot
from tui.screens.base import AppServices
from tui.screens.charts import ChartScreen
from tui.screens.dialogs import ConfigDialog
from tui.screens.log import LogDialog
from tui.screens.run_changes import RunChanges
from tui.screens.run_panels import PanelRoom, RunPanels
from tui.screens.run_progress import bottleneck_text, progress_line, state_lines
from tui.widgets.chart import ChartPanel
from tui.widgets.text_line import TextLine

# A long journal is read in slices, so that the screen stays responsive meanwhile.
DRAIN_BUDGET_SECONDS = 0.02
DRAIN_INTERVAL_SECONDS = 0.05
IDLE_SECONDS = 0.25
PROFILED_STATES = (RunState.STARTING, RunState.RUNNING, RunState.PAUSED)


class RunScreen(ChartScreen):
    """Follows one run, live or ended, and sends it control requests."""

    CSS_PATH = "run.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = RUN_KEYS

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        super().__init__(app)
        self.folder = folder
        self.data = Curves(max_columns=MAX_STEP_COLUMNS)
        self._points = JournalPoints()
        self._poller = self.follow(RunPoller(folder))
        self._changes = RunChanges(app, self)
        self._drawn: tuple[Curves | None, int] = (None, -1)
        self._next_draw_time = 0.0
        self._first_update_done = False
        self._idle_until = 0.0

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="progress")
        yield TextLine(id="bottleneck")
        yield TextLine(id="message")
        yield RunPanels(id="panels")

    def on_mount(self) -> None:
        self.set_interval(DRAIN_INTERVAL_SECONDS, self._drain_events)
        self.query_one("#loss").focus()

    def _drain_events(self) -> None:
        """Consume queued events within the time budget, and redraw the charts when due."""
        now = time.monotonic()
        if not self.is_on_top or now < self._idle_until:
            return
        if not self._first_update_done and self._poller.latest is not None:
            self._first_update_done = True
            self.update_content()
        end = time.perf_counter() + DRAIN_BUDGET_SECONDS
        while time.perf_counter() < end:
            try:
                batch = self._poller.events.get_nowait()
            except queue.Empty:
                break
            if batch is None:
                self.data, self._points = Curves(max_columns=MAX_STEP_COLUMNS), JournalPoints()
            self.data.add([self._points.read(batch or ())])
        if self._poller.caught_up and self._first_update_done:
            self._idle_until = now + IDLE_SECONDS
        due = (
            now >= self._next_draw_time
            if self._poller.caught_up and self._poller.events.empty()
            else now >= self._next_draw_time + 1.0
        )
        if due and (self.data, self.data.version) != self._drawn:
            self.draw_charts()

    def draw_charts(self) -> None:
        self._next_draw_time = time.monotonic() + (
            self.gputrain_app.intervals.charts_s if self._drawn[0] is not None else 0.5
        )
        self._drawn = (self.data, self.data.version)
        self.view = replace(self.view, charts={**self.view.charts, **{row.id: row for row in run_charts(self.data)}})
        super().draw_charts()

    @property
    def chart_data(self) -> Curves:
        return self.data

    def draw_chart(self, chart: ChartPanel) -> None:
        data, view, chart_id = self.data, self.view, str(chart.id)
        row, window = view.charts[chart_id], view.window(data, chart_id)
        curves = curves_for(data, row, view.axis)
        chart.draw(curves, window, self.chart_note(chart_id), view.cursor, best_note(data, row))

    def chart_note(self, chart_id: str) -> str:
        return "  ".join([*self.view.settings(chart_id), *data_notes(self.data, self.view.charts[chart_id])])

    def update_content(self) -> None:
        snapshot = self._poller.latest
        if snapshot is None:
            self.show_title(printable(self.folder.name))
            return
        self.show_title(printable(self.folder.name), printable(str(self.folder.path.parent)))
        self.show_line("#progress", progress_line(snapshot.row, self.size.width))
        bottleneck = bottleneck_text(snapshot.row, self.size.width)
        self.query_one("#bottleneck").display = bool(bottleneck.plain)
        self.show_line("#bottleneck", bottleneck)
        message = self._message_lines(snapshot)
        message_line = self.query_one("#message", TextLine)
        message_line.display, message_line.styles.height = bool(message), max(len(message), 1)
        message_line.show(Text("\n", end="").join(message))
        self._fit_panels(snapshot, 1 + bool(bottleneck.plain) + len(message))
        self.query_one(RunPanels).show(snapshot, self.gputrain_app.gpu_poller.snapshot)

    def _fit_panels(self, snapshot: RunSnapshot, status_lines: int) -> None:
        started = snapshot.ranks.started
        room = PanelRoom(
            width=self.size.width,
            # Title and footer have a line each.
            height=self.size.height - status_lines - 2,
            ranks=max(len(started.ranks), 1) if started else 1,
            log_lines=len(snapshot.log),
            has_grad_norm=self.data.has("grad_norm") or not self.data.num_points,
            has_loads=bool(snapshot.ranks.loads),
        )
        if self.query_one(RunPanels).fit(room) and self._drawn[0] is not None:
            self.call_after_refresh(self.draw_charts)

    def _message_lines(self, snapshot: RunSnapshot) -> list[Text]:
        """Return the lines below the progress: why the run failed, or what else the user should know."""
        lines = state_lines(
            snapshot, self._poller.unexpected_error, self.gputrain_app.gpu_poller.snapshot, self.size.width,
            self.app.console,
        )  # fmt: skip
        if lines:
            return lines
        if snapshot.row.state == RunState.STARTING:
            return [Text(" Starting the ranks", MUTED)]
        if not self._poller.caught_up:
            return [Text(f" Reading the journal: {int(self.data.last_x('step')):,} steps so far", WARNING)]
        return []

    def is_available(self, action: str) -> bool:
        """Hide commands that have no effect in the state of the run."""
        snapshot, state = self._poller.latest, self.state
        name = action.partition("(")[0]
        if name in ("pause", "checkpoint", "profile") and state is RunState.WAITING:
            return False
        if name in ("stop", "pause", "checkpoint"):
            return state is not None and state.live and (name == "stop" or state is not RunState.STOPPING)
        if name == "resume":
            return state is not None and not state.live and snapshot is not None and snapshot.resumable
        if name == "confusion":
            return snapshot is not None and snapshot.evaluated
        return super().is_available(action)

    def title_of(self, key: Key) -> str:
        """Return `continue` for a paused run, and `all panels` while one chart fills the screen."""
        if key.action == "pause" and self.state is RunState.PAUSED:
            return "continue"
        return super().title_of(key)

    @property
    def state(self) -> RunState | None:
        """The state of the run at the latest poll; None before the first one."""
        return RunState(self._poller.latest.row.state) if self._poller.latest is not None else None

    def action_checkpoint(self) -> None:
        self._changes.request(self.folder, self.state, "checkpoint")

    def action_pause(self) -> None:
        request: RequestName = "continue" if self.state is RunState.PAUSED else "pause"
        self._changes.request(self.folder, self.state, request)

    def action_stop(self) -> None:
        self._changes.stop(self.folder, self.state)

    def action_resume(self) -> None:
        self.gputrain_app.resume_run(self.folder, self.state)

    def action_again(self) -> None:
        self._changes.again(self.folder)

    def export_folder(self) -> tuple[Path, str]:
        if not self.folder.is_own:
            return super().export_folder()
        return self.folder.exports, str(self.folder.exports)

    def export_name(self) -> str:
        return self.folder.name

    def action_confusion(self) -> None:
        from tui.screens.confusion import ConfusionScreen

        self.app.push_screen(ConfusionScreen(self.gputrain_app, self.folder))

    def action_profile(self) -> None:
        """Open the profiles of the run; a live run takes another one at once."""
        if self.gputrain_app.demo_notice:
            self.gputrain_app.show_toast(
                Problem("", "Demo mode: simulated runs cannot be profiled", code="not-supported")
            )
            return
        from tui.screens.profile import ProfileScreen

        self.app.push_screen(ProfileScreen(self.gputrain_app, self.folder, asks=self.state in PROFILED_STATES))

    def action_config(self) -> None:
        self.app.push_screen(ConfigDialog(self.folder.name, self.folder.config))

    def action_log(self) -> None:
        self.app.push_screen(
            LogDialog(self.folder.name, lambda: self._poller.latest.log if self._poller.latest else ())
        )
