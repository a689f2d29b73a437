"""One run: how far it is, its curves, its GPUs, its log, and the requests that can be made of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.widgets import Static

from engine.runs.control import RequestName, send_request
from engine.runs.folder import RunFolder, State
from engine.utils.errors import UsageError
from engine.utils.text import printable
from tui.charts.curves import Curves
from tui.charts.view import View
from tui.keymap import RUN, Command
from tui.pollers import RunFeed
from tui.screens.base import AppServices, CockpitScreen
from tui.screens.dialogs import Reader, stop_question
from tui.text.palette import BAD, MUTED, STRONG, WARNING
from tui.text.run_progress import device_lines, limit_line, progress_line
from tui.text.runs import RunNow
from tui.widgets.chart import Chart
from tui.widgets.lines import Lines

# What of a second the reading of a long history may take, and how often it goes on.
FOLD_SECONDS = 0.02
FOLD_EVERY_SECONDS = 0.05
REST_SECONDS = 0.25
QUESTION = {
    State.RUNNING: "Stop it? It saves a checkpoint, and can be resumed.",
    State.PAUSED: "Stop it? It saves a checkpoint, and can be resumed.",
    State.STARTING: "Stop it before its first step?",
}


class RunScreen(CockpitScreen):
    COMMANDS_HERE: ClassVar[Sequence[Command]] = RUN

    def __init__(self, app: AppServices, folder: RunFolder) -> None:
        super().__init__(app)
        self.folder = folder
        self.data = Curves()
        self.view = View()
        self._feed = RunFeed(folder)
        self._drawn = -1
        self._left: list[Chart] = []
        self._draw_at = 0.0
        self._shown = False
        self._rest_until = 0.0

    def body(self) -> ComposeResult:
        yield Static("", id="progress", markup=False)
        yield Static("", id="limit", markup=False)
        yield Static("", id="message", markup=False)
        with Container(id="charts"):
            yield Chart("loss", "loss")
            yield Chart("accuracy", "accuracy")
            yield Chart("learning rate", "lr")
            devices = Lines(id="devices")
            devices.border_title = "GPUs of this run"
            yield devices
        log = Lines(id="log")
        log.border_title = "log"
        yield log

    def on_mount(self) -> None:
        self._feed.start()
        self.set_interval(FOLD_EVERY_SECONDS, self._fold)
        self.query_one("#loss").focus()

    def on_unmount(self) -> None:
        self._feed.close()

    def _fold(self) -> None:
        """Take events from the queue for a little while, and draw when they are due."""
        now = time.monotonic()
        if not self.on_top or now < self._rest_until:
            return
        if not self._shown and self._feed.now is not None:
            self._shown = True
            self.tick()
        end = time.perf_counter() + FOLD_SECONDS
        while time.perf_counter() < end:
            try:
                batch = self._feed.events.get_nowait()
            except queue.Empty:
                break
            self.data.add_events(batch)
        if self._feed.caught_up and self._shown:
            self._rest_until = now + REST_SECONDS
        due = now >= self._draw_at if self._feed.caught_up and self._feed.events.empty() else now >= self._draw_at + 1.0
        if due and self.data.version != self._drawn:
            self._draw()

    def _draw(self) -> None:
        """The charts one after the other, the one that has the focus first, so that no key waits for all of them."""
        self._draw_at = time.monotonic() + (self.cockpit.intervals.charts if self._drawn >= 0 else 0.5)
        self._drawn = self.data.version
        self._left = sorted(self.query(Chart), key=lambda chart: chart is not self.chart)
        self._draw_next()

    def _draw_next(self) -> None:
        while self._left:
            chart = self._left.pop(0)
            if chart.display and chart.id is not None:
                data, view = self.data, self.view
                curves, window = view.curves_of(data, chart.id), view.window(data, chart.id)
                chart.draw(curves, window, view.note(data, chart.id), view.cursor)
                self.call_after_refresh(self._draw_next)
                return

    def tick(self) -> None:
        now = self._feed.now
        if now is None:
            self.show_title(printable(self.folder.name))
            return
        self.show_title(f"{printable(self.folder.name)}   {printable(str(self.folder.path.parent))}")
        self.show_line("#progress", progress_line(now.row, self.size.width))
        limit = limit_line(now.row, self.size.width)
        self.query_one("#limit").display = bool(limit.plain)
        self.show_line("#limit", limit)
        self._show_message(now)
        devices = self.query_one("#devices", Lines)
        title, lines = device_lines(now, devices.size.width)
        devices.retitle(title)
        devices.show_texts(lines)
        log = self.query_one("#log", Lines)
        log.show_texts([Text(printable(line)) for line in now.log[-max(log.size.height, 1) :]])

    def _show_message(self, now: RunNow) -> None:
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        if self._feed.fault is not None:
            line.append(f" {printable(self._feed.fault)}", BAD)
        elif now.gone:
            line.append(" the folder of this run is gone; what was read of it is still shown", BAD)
        elif now.row.message:
            style = BAD if now.row.state in (State.FAILED, State.CRASHED) else MUTED
            line.append(f" {printable(now.row.message)}", style)
        elif now.row.state == State.STARTING:
            line.append(" its ranks are being set up", MUTED)
        elif not self._feed.caught_up:
            line.append(f" reading its history: {self.data.last_step:,} steps so far", WARNING)
        self.query_one("#message").display = bool(line.plain)
        self.show_line("#message", line)

    @property
    def state(self) -> State | None:
        return State(self._feed.now.row.state) if self._feed.now is not None else None

    # Requests

    def _ask(self, request: RequestName) -> None:
        if self.state is None or not self.state.live:
            self.cockpit.show_toast(f"this run is over: it is {self.state or 'not read yet'}", warning=True)
            return
        try:
            send_request(self.folder.control, request)
        except UsageError as error:
            self.cockpit.show_toast(str(error), warning=True)
            return
        self.cockpit.show_toast(f"asked to {request}; the log says when it has")

    def action_stop(self) -> None:
        question = QUESTION.get(self.state) if self.state is not None else None
        if question is None:
            self._ask("stop")
            return

        def answer(key: str | None) -> None:
            if key == "yes":
                self._ask("stop")

        self.app.push_screen(stop_question(question), answer)

    def action_checkpoint(self) -> None:
        self._ask("checkpoint")

    def action_pause(self) -> None:
        self._ask("continue" if self.state is State.PAUSED else "pause")

    def action_resume(self) -> None:
        self.cockpit.resume_run(self.folder, self.state)

    def action_again(self) -> None:
        self.cockpit.open_form(self.folder.config)

    # What is seen

    def _see(self, view: View) -> None:
        self.view = view
        self._draw()

    def action_x_axis(self) -> None:
        self._see(self.view.next_axis())

    def action_smooth(self) -> None:
        self._see(self.view.next_smoothing())

    def action_log_scale(self) -> None:
        self._see(replace(self.view, log=not self.view.log))

    def action_zoom(self, factor: float) -> None:
        self._see(self.view.zoom(self.data, factor))

    def action_zoom_all(self) -> None:
        self._see(self.view.whole())

    def action_pan(self, share: float) -> None:
        self._see(self.view.pan(self.data, share))

    def action_cursor(self, columns: int) -> None:
        self.view = self.view.move_cursor(self.data, columns)
        self.chart.point(self.view.cursor, self.view.note(self.data, str(self.chart.id)))
        self.call_after_refresh(self._point_others)

    def _point_others(self) -> None:
        for chart in self.query(Chart):
            if chart is not self.chart:
                chart.point(self.view.cursor, self.view.note(self.data, str(chart.id)))

    @property
    def chart(self) -> Chart:
        """The one that has the focus, else the first."""
        return self.focused if isinstance(self.focused, Chart) else self.query_one("#loss", Chart)

    def action_full(self) -> None:
        full = not self.has_class("-full")
        chart = self.chart
        for one in self.query("#charts > Lines"):
            one.set_class(full and one is chart, "shown")
        self.set_class(full, "-full")
        chart.focus()
        self.call_after_refresh(self._draw)

    def action_export(self) -> None:
        from tui.charts.export import export_chart

        chart = self.chart
        if not any(len(curve.series.y) for curve in chart.curves):
            self.cockpit.show_toast("there is nothing to export yet", warning=True)
            return
        try:
            paths = export_chart(
                self.folder.name, str(chart.id), chart.curves, chart.window, self.view.axis, Path.cwd()
            )
        except OSError as error:
            self.cockpit.show_toast(f"cannot be written to {Path.cwd()}: {error.strerror}", warning=True)
            return
        self.cockpit.show_toast(f"saved {' and '.join(map(str, paths))}", timeout_s=8)

    def action_confusion(self) -> None:
        from tui.screens.confusion import ConfusionScreen

        self.app.push_screen(ConfusionScreen(self.cockpit, self.folder))

    def action_config(self) -> None:
        try:
            text = self.folder.config.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            self.cockpit.show_toast(f"the config cannot be read: {error.strerror}", warning=True)
            return
        self.app.push_screen(Reader("config", [Text(printable(line)) for line in text.splitlines()]))

    def action_log(self) -> None:
        now = self._feed.now
        lines = [Text(printable(line)) for line in (now.log if now else ())]
        self.app.push_screen(Reader("log", lines or [Text("nothing yet", STRONG)]))
