"""The screen of one run: progress, charts, ranks and log, and what its keys request of it.

A run of gputrain is live or ended, a training or the command of another program. A run that another program recorded
is only watched: no key changes it. What cannot be done with a run is missing in its abilities (`tui.screens.keymap`).
`tui.screens.pollers.run` reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.base.text import printable
from engine.config.tasks import stored_task_facts
from engine.gpus.snapshot import Snapshot
from engine.jobs.command.spec import has_command, read_command
from engine.jobs.launch.detached import LaunchedRun
from engine.report.charts import Chart, Kind, Place, charts_of, kind_of, run_charts
from engine.runs.curves import Curves
from engine.runs.folder import RunFolder, RunState
from engine.runs.metrics import NO_METRICS, metric_of_key
from engine.runs.run_record import NO_RECORD
from engine.runs.run_row import RunRow, read_row
from engine.watch import text_log
from engine.watch.activity import Activity
from engine.watch.folders import ForeignRun
from tui.charts.view import ChartView, best_note, curves_for, data_notes
from tui.screens.charts import ChartScreen
from tui.screens.dialogs import LogDialog, TextDialog, confirm, read_config_lines
from tui.screens.host_panel import load_text
from tui.screens.keymap import RUN_KEYS, Ability, Key
from tui.screens.pollers.process import ProcessPoller, ProcessReading, owner_of
from tui.screens.pollers.run import RunPoller, RunSnapshot
from tui.screens.run_keys import RunKeysScreen
from tui.screens.run_layout import RANKS_PANEL, RunRoom
from tui.screens.run_panels import MAX_LOG_LINES, NO_CHARTS, RunPanels
from tui.screens.run_progress import RunStatus, launch_lines, status_lines
from tui.screens.services import AppServices
from tui.screens.tables import fact_lines, wrap_text
from tui.screens.tables.foreign_runs import parameter_text
from tui.screens.tables.log_lines import log_lines, output_line
from tui.screens.tables.ranks import RankReadings
from tui.screens.tables.run_facts import run_facts
from tui.screens.widgets.chart import ChartPanel
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import MUTED, STRONG

TICK_SECONDS = 0.1
DEFAULT_CHARTS = 6
# Opening the help takes 80 ms of a core.
KEY_SECONDS = 0.15
STATUS_LINES = ("#progress", "#bottleneck", "#message")
PROFILED_STATES = (RunState.STARTING, RunState.RUNNING, RunState.PAUSED)
BEGUN_ACTIONS = (
    *("pause", "checkpoint", "resume", "again", "archive", "details", "processes", "confusion", "profile", "metrics"),
)
NOT_WAITING_ACTIONS = ("pause", "checkpoint", "profile")


def unnamed_run(runs_dir: Path) -> RunFolder:
    """Return what stands for the folder of a run that is starting and has none yet."""
    return RunFolder(runs_dir / ".new")


def abilities_of(run: RunFolder | ForeignRun, launched: LaunchedRun | None = None) -> Ability:
    """Return what can be done with a run."""
    if isinstance(run, ForeignRun):
        return Ability.WATCH | Ability.CHOOSE
    is_command = has_command(run) or (launched is not None and launched.has_command)
    own = Ability.COMMAND | Ability.CHOOSE if is_command else Ability.TRAIN
    return Ability.WATCH | Ability.CHANGE | own


class RunScreen(ChartScreen, RunKeysScreen):
    """Follows one run, and sends requests to the owner of one of gputrain."""

    CSS_PATH = "run.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = RUN_KEYS

    def __init__(
        self,
        app: AppServices,
        run: RunFolder | ForeignRun,
        process: ProcessPoller | None = None,
        launched: LaunchedRun | None = None,
    ) -> None:
        """`process` watches the process of a run of another program, if one is known. `launched` is what starts the
        run, until it has begun; a new run has no folder then."""
        super().__init__(app, abilities_of(run, launched))
        self.folder = run if isinstance(run, RunFolder) else None
        self.launched, self.poller = launched, RunPoller(run, self.is_busy)
        if launched is None or launched.claimed is not None:
            self.follow(self.poller)
        else:
            # There is nothing to read.
            self.poller.caught_up = True
        if launched is None and self.folder is not None and Ability.COMMAND in self.abilities:
            process = self.follow(ProcessPoller(partial(owner_of, self.folder), app.intervals.poll_s, searches=False))
        self._process = process
        self.view = (
            ChartView(charts=NO_CHARTS) if self.is_training else ChartView("step", axes=("step",), charts=NO_CHARTS)
        )
        self._chosen: Collection[str] = ()
        """The ids of the charts that the user chose."""
        self._first_chart = 0
        """The place of the first chart that is shown, unless the user chose some."""
        self._grouped: object = None
        self._drawn: tuple[Curves | None, int] = (None, -1)
        self._draw_time = -math.inf
        self._num_status_lines = 1
        self._had_charts: bool | None = None

    @property
    def is_training(self) -> bool:
        return Ability.TRAIN in self.abilities

    @property
    def name_of_run(self) -> str:
        if self.launched is not None:
            return "new run" if self.launched.claimed is None else self.launched.claimed.name
        return self.poller.run.name if self.folder is None else self.folder.name

    def compose_body(self) -> ComposeResult:
        for line in STATUS_LINES:
            yield TextLine(id=line.removeprefix("#"))
        yield RunPanels(id="panels")

    def on_mount(self) -> None:
        self.set_interval(TICK_SECONDS, self._show_news)
        self._group_metrics()
        self._focus_first_panel()

    @property
    def has_content(self) -> bool:
        # Requests depend on the state of the run.
        return self.folder is None or self.snapshot is not None or self.launched is not None

    def is_busy(self) -> bool:
        """Whether a key is likely to be handled now."""
        return time.monotonic() - self.gputrain_app.last_key_time < KEY_SECONDS

    # What is known of the run

    @property
    def log_of_run(self) -> Sequence[str]:
        """The last lines of the log; of a run that is starting, what was printed."""
        return self.poller.log if self.launched is None else self.launched.output_lines()

    @property
    def _num_charts(self) -> int:
        if self.launched is not None and self.launched.exit_code is not None:
            # The reason why it did not start has their place.
            return 0
        # Without an owner, a run may get its first chart at any time.
        return max(self.run_panels.num_charts, self.folder is None)

    @property
    def shown_charts(self) -> list[Chart]:
        return super().shown_charts if self._num_charts else []

    @property
    def snapshot(self) -> RunSnapshot | None:
        """The latest state of a run of gputrain; None before the first poll."""
        return self.poller.latest

    @property
    def state(self) -> RunState | None:
        return RunState(self.snapshot.row.state) if self.snapshot is not None else None

    @property
    def is_live(self) -> bool:
        """Whether the run goes on."""
        return self._activity is Activity.GROWING if self.folder is None else bool(self.state and self.state.live)

    @property
    def _reading(self) -> ProcessReading | None:
        """What is known of the process of the run."""
        return None if self._process is None else self._process.latest

    @property
    def _activity(self) -> Activity:
        return self.poller.activity(None if self._reading is None else self._reading.ended_at)

    @property
    def _gpus(self) -> Snapshot | None:
        return self.gputrain_app.gpu_poller.snapshot

    @property
    def run_panels(self) -> RunPanels:
        return self.query_one(RunPanels)

    @property
    def chart_data(self) -> Curves:
        return self.poller.reader.curves

    # Charts

    def _show_news(self) -> None:
        """Draw what was read: at once after a pause, else at the rate at which charts are updated."""
        curves, poller, intervals = self.chart_data, self.poller, self.gputrain_app.intervals
        if (curves, curves.version) == self._drawn or not self.is_topmost:
            return
        # Drawing takes time from reading, and from a key while the run is read.
        interval = intervals.charts_s if self.is_training or not poller.caught_up else intervals.poll_s
        has_time = poller.caught_up or (curves.num_points > 0 and not self.is_busy())
        if has_time and time.monotonic() >= self._draw_time + interval:
            self.draw_charts()
            self.update_if_on_top()

    def draw_charts(self) -> None:
        self._draw_time = time.monotonic()
        self._drawn = (self.chart_data, self.chart_data.version)
        self._group_metrics()
        self._fit_panels()
        super().draw_charts()

    def _group_metrics(self) -> None:
        """Find the charts of the metrics that have points, and the x axes. A training has its charts before."""
        data = self.chart_data
        grouped = (_, axes, _) = data.names, data.axes, set(data.odd_steps)
        if grouped == self._grouped:
            return
        self._grouped = grouped
        self._charts = charts_of(Place.RUN) if self.is_training and not data.is_own else run_charts(data)
        self._choose()
        if (data.is_own or not self.is_training) and axes != self.view.axes:
            self.view = replace(self.view, axes=axes, axis=self.view.axis if self.view.axis in axes else axes[0])

    def _choose(self) -> None:
        """Show the charts that the user chose, else a page of them, first the results."""
        charts, first = self._charts, self._first_chart
        chosen = [chart for chart in charts if chart.id in self._chosen]
        results = [chart for chart in charts if kind_of(chart.id) is not Kind.PROGRESS] if not first else []
        self.run_panels.choose(chosen or (results or charts[first:])[:DEFAULT_CHARTS])
        self.view = replace(self.view, charts=self.run_panels.chosen)

    def draw_chart(self, chart: ChartPanel) -> None:
        data, view, chart_id = self.chart_data, self.view, str(chart.id)
        row, window = view.charts[chart_id], view.window(data, chart_id)
        record = NO_RECORD if self.snapshot is None else self.snapshot.row.record
        # The loss of a step is not yet that of its epoch.
        shown = {
            key: record.values.get(key) for key in row.metrics if not self.is_live or metric_of_key(key).is_of_step
        }
        curves = curves_for(data, row, view.axis, record, shown)
        chart.draw(curves, window, self.chart_note(chart_id), view.cursor, best_note(data, row, record))

    def chart_note(self, chart_id: str) -> str:
        return "  ".join([*self.view.settings(chart_id), *data_notes(self.chart_data, self.view.charts[chart_id])])

    # Content

    def _charts_note(self) -> str:
        """Return which of the charts are shown if there are others: `charts 7-12 of 31`, of chosen ones how many."""
        shown, count, first = self.run_panels.num_charts, len(self._charts), self._first_chart
        if shown >= count or Ability.CHOOSE not in self.abilities:
            return ""
        return f"{shown} of {count} charts (e)" if self._chosen else f"charts {first + 1}-{first + shown} of {count}"

    def update_content(self) -> None:
        place = self.poller.run.folder if self.folder is None else self.folder.path.parent
        load = load_text(self.gputrain_app.host_poller.value) if Ability.COMMAND in self.abilities else ""
        details = "   ".join(filter(None, [self._charts_note(), printable(str(place))]))
        self.show_title(printable(self.name_of_run), details, load)
        self._show_status()
        if self._fit_panels() and self._drawn[0] is not None:
            self.call_after_refresh(self.draw_charts)
        panels, snapshot, tail = self.run_panels, self.snapshot, self.log_of_run[-MAX_LOG_LINES:]
        epochs = () if snapshot is None else snapshot.epochs
        texts = list(map(output_line, tail)) if self.folder is None else log_lines(tail, epochs)
        if self.launched is not None:
            # Before the first layout, the panel has no width yet; it will have that of the screen without the frame and
            # the scrollbar.
            width = panels.log_panel.text_width
            width = width if width > 0 else self.size.width - 4
            texts = [part for line in tail for part in wrap_text(Text(printable(line)), width)]
        panels.show_log(texts, live=self.is_live)
        if snapshot is not None and panels.get_child_by_id(RANKS_PANEL).display:
            panels.show_ranks(snapshot.ranks, self._gpus)
        has_charts = self._num_charts > 0
        if (snapshot or self.launched) is not None and has_charts != self._had_charts:
            self._focus_first_panel()
            self._had_charts = has_charts

    def _focus_first_panel(self) -> None:
        # Without charts, the log has their place.
        (self.active_chart if self._num_charts else self.run_panels.log_panel).focus()

    def _show_status(self) -> None:
        """Show the lines below the title."""
        has_ranks = self.run_panels.get_child_by_id(RANKS_PANEL).display
        status = RunStatus(self.poller, self._reading, self._gpus, self.size.width, has_ranks=has_ranks)
        self._num_status_lines = 0
        shown = status_lines(status, self.app.console) if self.launched is None else launch_lines(self.launched, status)
        for selector, lines in zip(STATUS_LINES, shown, strict=True):
            self.query_one(selector, TextLine).show_lines(lines)
            self._num_status_lines += len(lines)

    def _fit_panels(self) -> bool:
        """Arrange the panels. Return whether a chart appeared, which is then to be drawn."""
        # Title and footer have a line each.
        width, height = self.size.width, self.size.height - 2 - self._num_status_lines
        ranks = self.snapshot.ranks if self.snapshot is not None else RankReadings()
        has_ranks = self.is_training and self.launched is None
        count = ranks.count if has_ranks or ranks.command is not None else 0
        room = RunRoom(width, height, self._num_charts, count, len(self.log_of_run), bool(ranks.loads))
        return self.run_panels.fit(room)

    # Keys

    def is_available(self, action: str) -> bool:
        """Hide keys that have no effect in the state of the run."""
        snapshot, state, name = self.snapshot, self.state, action.partition("(")[0]
        if self.launched is not None and name in (*BEGUN_ACTIONS, "stop"):
            return name == "stop" and self.launched.exit_code is None
        if name in NOT_WAITING_ACTIONS and state is RunState.WAITING:
            return False
        if name in ("stop", "pause", "checkpoint"):
            return self.is_live and (state is not RunState.STOPPING or (name == "stop"))
        if name == "resume":
            return (
                snapshot is not None
                and not self.is_live
                and state is not RunState.FINISHED
                and (snapshot.resumable or not self.is_training)
            )
        if name == "confusion":
            return snapshot is not None and snapshot.evaluated
        if name == "processes":
            return self.is_live and self._reading is not None
        if name == "log":
            return self.folder is not None or self.poller.log_file is not None
        if name == "page_charts":
            return bool(self._charts_note())
        if name == "x_axis" and len(self.view.axes) < 2:
            return False
        return super().is_available(action)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave out what needs the folder of a run that is starting."""
        return super().check_action(action, parameters) and (self.launched is None or action not in BEGUN_ACTIONS)

    async def action_back(self) -> None:
        if self.launched is not None and self.launched.exit_code is not None and not self.panels.is_full:
            # Its output was shown here, so the command line need not print it on exit.
            self.gputrain_app.pending_runs.remove(self.launched)
        await super().action_back()

    def title_of(self, key: Key) -> str:
        """Return what the key does in this state: `continue` for a paused run."""
        if key.action == "details":
            return "config" if self.is_training else "parameters" if self.folder is None else "command"
        if key.action == "confusion" and self.snapshot is not None:
            facts = stored_task_facts(self.snapshot.row.record.config or {})
            return super().title_of(key) if facts.ranked else facts.outputs
        return super().title_of(key)

    def action_stop(self) -> None:
        if self.launched is not None:
            if self.launched.exit_code is None:
                question = f"Stop {printable(self.name_of_run)} before its first step?"
                confirm(self.app, question, "Keep it running", "Stop", self.launched.process.terminate)
        elif self.folder is not None:
            self._changes.stop(self.folder, self.state)

    def action_checkpoint(self) -> None:
        if self.folder is not None:
            self._changes.request(self.folder, self.state, "checkpoint")

    def selected_run(self) -> RunRow | None:
        return None if self.snapshot is None else self.snapshot.row

    def action_page_charts(self, step: int) -> None:
        """Show the next charts, or those before. The first page follows chosen ones."""
        first = self._first_chart + (self.run_panels.num_charts if step > 0 else -DEFAULT_CHARTS)
        first = 0 if self._chosen else max(first, 0)
        if first < len(self._charts):
            self._first_chart = first
            self.show_charts(())

    def show_charts(self, chosen: Collection[str]) -> None:
        self._chosen = chosen
        self._choose()
        self.update_content()
        self.call_after_refresh(self.draw_charts)

    def action_details(self) -> None:
        """Show the config of a training, else the parameters, and what is known of the run of a command.

        They are read in a thread."""
        folder = self.folder
        what = "Config" if self.is_training else "Parameters" if folder is None else "Command"
        dialog = TextDialog(f"{what} of {printable(self.name_of_run)}", [Text("Loading …", MUTED)])

        def read() -> tuple[list[Text], str]:
            if self.is_training and folder is not None:
                return read_config_lines(folder.config)
            parameters = self.poller.reader.parameters()
            lines = fact_lines({key: parameter_text(value) for key, value in parameters.items()})
            if folder is None:
                return list(map(Text, lines or ["The run has no parameters in a known file"])), ""
            row = read_row(folder)
            facts = {} if row is None else run_facts(row, folder, NO_METRICS)
            facts.pop("parameters", None)
            about = [*map(Text, fact_lines(facts)), Text(""), Text("Parameters", STRONG)]
            return [*about, *map(Text, lines or ["none found"])], ""

        self.app.push_screen(dialog)
        self.act(read, lambda found: dialog.show(*found), in_thread=True)

    def action_metrics(self) -> None:
        """Show how the output of the run is read, and let the user change what its metrics are called."""
        from tui.screens.run_metrics import RunMetrics

        run, folder = self.poller.run, self.folder
        log = next((each.files[0] for each in run.logs if each.format == text_log.FORMAT), None)
        patterns = () if folder is None else read_command(folder).parse
        metrics = RunMetrics(self, run.folder.parent, self.chart_data, self.poller.read_again)
        metrics.open(log if folder is None else folder.log, patterns)

    def action_log(self) -> None:
        self.app.push_screen(LogDialog(self.name_of_run, lambda: self.log_of_run))

    def action_processes(self) -> None:
        from tui.screens.process import ProcessScreen

        process = None if self._process is None else self._process.process
        if process is not None and self.is_available("processes"):
            self.app.push_screen(ProcessScreen(self.gputrain_app, process, opens_run=False))

    def action_confusion(self) -> None:
        from tui.screens.confusion import ConfusionScreen

        if self.folder is not None:
            self.app.push_screen(ConfusionScreen(self.gputrain_app, self.folder))

    def action_profile(self) -> None:
        """Open the profiles of the run; a live run without one takes one at once."""
        from tui.screens.profile import ProfileScreen

        if self.folder is not None and not self.gputrain_app.refuses_in_demo("simulated runs cannot be profiled"):
            self.app.push_screen(ProfileScreen(self.gputrain_app, self.folder, asks=self.state in PROFILED_STATES))
