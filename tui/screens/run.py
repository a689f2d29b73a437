"""The screen of one run: progress, bottleneck, charts, GPUs, log, and the control requests that it sends.

`tui.pollers.RunPoller` reads the journal; `tui.charts` turns its events into curves.
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
from textual.binding import Binding, BindingType

from engine.runs.control import RequestName, send_request
from engine.runs.folder import RunFolder, RunState
from engine.utils.errors import UsageError
from engine.utils.text import printable
from tui.charts.curves import CurveData
from tui.charts.view import ChartView
from tui.keymap import RUN_COMMANDS, Command
from tui.palette import BAD, MUTED, WARNING
from tui.pollers import RunPoller
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import ConfigDialog, stop_dialog
from tui.screens.log import LogDialog
from tui.screens.run_panels import PanelRoom, RunPanels
from tui.text.run_progress import FAILED_STATES, bottleneck_text, failure_lines, progress_line
from tui.text.runs import RunSnapshot
from tui.widgets.chart import Chart
from tui.widgets.text_line import TextLine

# A long journal is read in slices, so that the screen stays responsive meanwhile.
DRAIN_BUDGET_SECONDS = 0.02
DRAIN_INTERVAL_SECONDS = 0.05
IDLE_SECONDS = 0.25
STOP_QUESTIONS = {
    RunState.RUNNING: "Stop the run? It saves a checkpoint and can be resumed.",
    RunState.PAUSED: "Stop the run? It saves a checkpoint and can be resumed.",
    RunState.STARTING: "Stop the run before its first step?",
}


class RunScreen(GputrainScreen):
    """Follows one run, live or ended, and sends it control requests."""

    CSS_PATH = "run.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = RUN_COMMANDS
    # Instead of Textual's, which skip the hidden charts.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_panel(1)", show=False),
        Binding("shift+tab", "next_panel(-1)", show=False),
    ]

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        super().__init__(app)
        self.folder = folder
        self.data = CurveData()
        self.view = ChartView()
        self._poller = RunPoller(folder)
        self._drawn_version = -1
        self._charts_to_draw: list[Chart] = []
        self._next_draw_time = 0.0
        self._first_update_done = False
        self._idle_until = 0.0

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="progress")
        yield TextLine(id="bottleneck")
        yield TextLine(id="message")
        yield RunPanels(id="panels")

    def on_mount(self) -> None:
        self._poller.start()
        self.set_interval(DRAIN_INTERVAL_SECONDS, self._drain_events)
        self.query_one("#loss").focus()

    def on_unmount(self) -> None:
        self._poller.close()

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
            self.data.add_events(batch)
        if self._poller.caught_up and self._first_update_done:
            self._idle_until = now + IDLE_SECONDS
        due = (
            now >= self._next_draw_time
            if self._poller.caught_up and self._poller.events.empty()
            else now >= self._next_draw_time + 1.0
        )
        if due and self.data.version != self._drawn_version:
            self._draw()

    def _draw(self) -> None:
        """Draw one chart per refresh, the focused one first, so that keys are handled in between."""
        self._next_draw_time = time.monotonic() + (
            self.gputrain_app.intervals.charts_s if self._drawn_version >= 0 else 0.5
        )
        self._drawn_version = self.data.version
        self._charts_to_draw = sorted(self.query(Chart), key=lambda chart: chart is not self.active_chart)
        self._draw_next()

    def _draw_next(self) -> None:
        while self._charts_to_draw:
            chart = self._charts_to_draw.pop(0)
            if chart.display and chart.id is not None:
                data, view = self.data, self.view
                curves, window = view.curves_for(data, chart.id), view.window(data, chart.id)
                chart.draw(curves, window, view.subtitle(data, chart.id), view.cursor, view.best_note(data, chart.id))
                self.call_after_refresh(self._draw_next)
                return

    def update_content(self) -> None:
        snapshot = self._poller.latest
        if snapshot is None:
            self.show_title(printable(self.folder.name))
            return
        self.show_title(f"{printable(self.folder.name)}   {printable(str(self.folder.path.parent))}")
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
            has_grad_norm=self.data.has_grad_norm or self.data.last_step == 0,
            has_loads=bool(snapshot.ranks.loads),
        )
        if self.query_one(RunPanels).fit(room) and self._drawn_version >= 0:
            self.call_after_refresh(self._draw)

    def _message_lines(self, snapshot: RunSnapshot) -> list[Text]:
        """Return the lines below the progress: why the run failed, or what else the user should know."""
        known = self._poller.unexpected_error is None and not snapshot.folder_missing and not snapshot.row.foreign
        if known and snapshot.row.state in FAILED_STATES:
            return failure_lines(snapshot, self.gputrain_app.gpu_poller.snapshot, self.size.width, self.app.console)
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        if self._poller.unexpected_error is not None:
            line.append(f" {printable(self._poller.unexpected_error)}", BAD)
        elif snapshot.folder_missing:
            line.append(" The run folder was deleted; this is the last known state", BAD)
        elif snapshot.row.foreign:
            line.append(f" {printable(f'This run {snapshot.row.foreign}')}", WARNING)
        elif snapshot.row.message and snapshot.row.state != RunState.FINISHED:
            line.append(f" {printable(snapshot.row.message)}", MUTED)
        elif snapshot.row.state == RunState.STARTING:
            line.append(" Starting the ranks", MUTED)
        elif not self._poller.caught_up:
            line.append(f" Reading the journal: {self.data.last_step:,} steps so far", WARNING)
        return [line] if line.plain else []

    def is_available(self, action: str) -> bool:
        """Hide commands that have no effect in the state of the run."""
        snapshot, state = self._poller.latest, self.state
        name = action.partition("(")[0]
        if name in ("stop", "pause", "checkpoint"):
            return state is not None and state.live and (name == "stop" or state is not RunState.STOPPING)
        if name == "resume":
            return state is not None and not state.live and snapshot is not None and snapshot.resumable
        if name == "confusion":
            return snapshot is not None and snapshot.evaluated
        if name == "zoom_all":
            return self.view != self.view.reset_zoom()
        return True

    def title_of(self, command: Command) -> str:
        """Return `continue` for a paused run, and `all panels` while one chart fills the screen."""
        if command.action == "pause" and self.state is RunState.PAUSED:
            return "continue"
        if command.action == "full" and self.query_one(RunPanels).is_full:
            return "all panels"
        return command.title

    @property
    def state(self) -> RunState | None:
        """The state of the run at the latest poll; None before the first one."""
        return RunState(self._poller.latest.row.state) if self._poller.latest is not None else None

    def _send_request(self, request: RequestName) -> None:
        if self.state is None or not self.state.live:
            why = f"is not running: it is {self.state}" if self.state else "is still loading"
            self.gputrain_app.show_toast(f"{self.folder.name} {why}", warning=True)
            return
        try:
            send_request(self.folder.control, request)
        except UsageError as error:
            self.gputrain_app.show_toast(str(error), warning=True)
            return
        # Toasts of earlier requests would cover the charts.
        self.app.clear_notifications()
        self.gputrain_app.show_toast(f"Sent the {request} request; the log shows its effect")

    def action_stop(self) -> None:
        question = STOP_QUESTIONS.get(self.state) if self.state is not None else None
        if question is None:
            self._send_request("stop")
            return

        def answer(key: str | None) -> None:
            if key == "yes":
                self._send_request("stop")

        self.app.push_screen(stop_dialog(question), answer)

    def action_checkpoint(self) -> None:
        self._send_request("checkpoint")

    def action_pause(self) -> None:
        self._send_request("continue" if self.state is RunState.PAUSED else "pause")

    def action_resume(self) -> None:
        self.gputrain_app.resume_run(self.folder, self.state)

    def action_again(self) -> None:
        self.gputrain_app.open_form(self.folder.config)

    def _set_view(self, view: ChartView) -> None:
        self.view = view
        self._draw()
        self.update_keys()

    def action_x_axis(self) -> None:
        self._set_view(self.view.next_axis())

    def action_smooth(self) -> None:
        self._set_view(self.view.next_smoothing())

    def action_log_scale(self) -> None:
        self._set_view(replace(self.view, log=not self.view.log))

    def action_zoom(self, factor: float) -> None:
        self._set_view(self.view.zoom(self.data, factor))

    def action_zoom_all(self) -> None:
        self._set_view(self.view.reset_zoom())

    def action_pan(self, share: float) -> None:
        self._set_view(self.view.pan(self.data, share))

    def action_cursor(self, columns: int) -> None:
        self.view = self.view.move_cursor(self.data, columns)
        self.active_chart.set_cursor(self.view.cursor, self.view.subtitle(self.data, str(self.active_chart.id)))
        self.call_after_refresh(self._move_other_cursors)

    def _move_other_cursors(self) -> None:
        for chart in self.query(Chart):
            if chart is not self.active_chart:
                chart.set_cursor(self.view.cursor, self.view.subtitle(self.data, str(chart.id)))

    @property
    def active_chart(self) -> Chart:
        """The chart that was focused last."""
        return self.query_one(RunPanels).active_chart

    def action_full(self) -> None:
        self.query_one(RunPanels).toggle_full()
        self.call_after_refresh(self._draw)
        self.update_keys()

    def action_next_panel(self, step: int) -> None:
        self.query_one(RunPanels).focus_next_panel(step)
        self.call_after_refresh(self._draw)

    def action_export(self) -> None:
        from tui.charts.export import export_chart

        chart = self.active_chart
        if not any(len(curve.series.y) for curve in chart.curves):
            self.gputrain_app.show_toast("This chart has no data to export yet", warning=True)
            return
        folder = Path()
        try:
            if self.folder.is_own:
                folder = self.folder.exports
                folder.mkdir(exist_ok=True)
            paths = export_chart(self.folder.name, str(chart.id), chart.curves, chart.window, self.view.axis, folder)
        except OSError as error:
            place = folder if self.folder.is_own else "the working directory"
            self.gputrain_app.show_toast(f"The chart cannot be written to {place}: {error.strerror}", warning=True)
            return
        names = " and ".join(path.name for path in paths)
        self.gputrain_app.show_toast(f"Saved {names} in {folder.absolute()}", timeout_s=8)

    def action_confusion(self) -> None:
        from tui.screens.confusion import ConfusionScreen

        self.app.push_screen(ConfusionScreen(self.gputrain_app, self.folder))

    def action_config(self) -> None:
        self.app.push_screen(ConfigDialog(self.folder.name, self.folder.config))

    def action_log(self) -> None:
        self.app.push_screen(
            LogDialog(self.folder.name, lambda: self._poller.latest.log if self._poller.latest else ())
        )
