"""The screen of a sweep: the curves of its trials, live, and what its values depend on.

`tui.screens.pollers.files` reads the sweep, `tui.charts.sweep` makes the curves; each trial opens as a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.base.errors import UsageError
from engine.base.text import printable
from engine.jobs.sweeps.folder import LAST_SWEEP, SweepFolder, find_sweep, list_sweeps, stop_sweep
from engine.runs.folder import sweep_of_trial
from tui.charts.sweep import axis_position, param_curves, trial_curves
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import confirm
from tui.screens.keymap import SWEEP_KEYS, Key
from tui.screens.launcher import call_gputrain
from tui.screens.pollers.files import watch_sweep
from tui.screens.run_changes import RunChanges
from tui.screens.services import AppServices
from tui.screens.tables import styled, wrap_text
from tui.screens.tables.sweeps import param_table, status_lines, trial_table
from tui.screens.widgets.chart import ChartPanel
from tui.screens.widgets.lines import KeyedRow, LazyRows, Lines, escape_markup
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import BAD, MUTED

if TYPE_CHECKING:
    from engine.jobs.sweeps.status import SweepStatus

# Of the lists below the charts, with their frame and their header.
HEADER_ROWS, MIN_ROWS = 3, 5
TRIAL_ACTIONS = ("open", "select", "compare")


def make_sweep_screen(app: AppServices, run_name: str) -> SweepScreen:
    """Return the screen of the sweep of this name or that a run is a trial of by its name, else of the latest sweep.

    Raises UsageError if there is no sweep, or other users can change it."""
    sweeps = list_sweeps(app.runs_dir)
    if not sweeps:
        reason = "There are no sweeps yet; start one with `gputrain sweep CONFIG KEY=SPACE`"
        raise UsageError.one("", reason, code="not-found")
    names = [sweep.name for sweep in sweeps]
    name, trial = (run_name, None) if run_name in names else sweep_of_trial(run_name) or ("", None)
    if name not in names:
        name, trial = LAST_SWEEP, None
    return SweepScreen(app, find_sweep(app.runs_dir, name), trial)


class SweepScreen(GputrainScreen):
    """The trials of one sweep: their curves, their values over a searched key, and what that key decides."""

    CSS_PATH = "sweep.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = SWEEP_KEYS

    def __init__(self, app: AppServices, folder: SweepFolder, trial: int | None = None) -> None:
        """`trial` is the number of the trial to select."""
        super().__init__(app)
        self._wanted = trial
        self._whole = False
        """Whether the charts have room for outliers."""
        self._drawn: object = None
        """What the charts show."""
        self.folder = folder
        self.sweep_poller = self.follow(watch_sweep(folder, app.intervals.poll_s))

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="sweep-status")
        with Container(id="sweep-panels"):
            for chart in (ChartPanel("", "trial-curves"), ChartPanel("", "param-chart")):
                chart.can_focus = chart.has_legend = False
                yield chart
            yield Lines(selectable=True, id="trials")
            yield Lines(selectable=True, id="params")

    def on_mount(self) -> None:
        self._trials.focus()

    @property
    def _trials(self) -> Lines:
        return self.query_one("#trials", Lines)

    def update_content(self) -> None:
        status, problem = self.sweep_poller.value, self.sweep_poller.problem
        self.show_title(f"sweep {printable(self.folder.name)}")
        if problem is not None:
            self._show_status([Text(printable(str(problem)), BAD)])
        elif status is None:
            is_gone = self.sweep_poller.has_polled
            missing = f"{self.folder.settings} does not exist anymore" if is_gone else "Loading …"
            self._show_status([Text(printable(missing), MUTED)])
        else:
            self._show_status(status_lines(status))
            self._draw_trials(status)
            self._draw_selected(status)

    def _show_status(self, texts: Sequence[Text]) -> None:
        """Show the texts above the panels, wrapped to the width of the screen."""
        lines = [part for text in texts for part in wrap_text(text, self.size.width - 2)]
        self.query_one("#sweep-status", TextLine).show_lines(lines)

    def _draw_trials(self, status: SweepStatus) -> None:
        trials, rows, marked = self._trials, status.by_value(), self.gputrain_app.marked_runs
        # The panels below the chart are as high as their longer list, and at most half of the screen.
        panels, lines = self.query_one("#sweep-panels"), max(len(rows), len(status.settings.space))
        panels.styles.grid_rows = f"1fr {min(lines + HEADER_ROWS, max(panels.size.height // 2, MIN_ROWS))}"
        table = trial_table(status, trials.text_width, lambda row: self._path(row.number) in marked)
        keys = [str(row.number) for row in rows]
        trials.set_rows(
            LazyRows(keys, lambda index: styled(table.line(rows[index]))),
            [styled(table.header(MUTED))],
            Text("No trial has begun", MUTED),
        )
        selected = sum(self._path(row.number) in marked for row in rows)
        trials.set_titles("Trials, best first" + (f", [$accent]{selected} selected[/]" if selected else ""))
        if self._wanted is not None and self._wanted < len(rows):
            trials.select_key(str(self._wanted))
            self._wanted = None

    def _draw_selected(self, status: SweepStatus) -> None:
        """Show the trial under the cursor in the charts and beside the best one."""
        number, params = self._trials.selected_key, self.query_one("#params", Lines)
        selected = None if number is None else status.trials[int(number)]
        keys = sorted(status.settings.space, key=lambda key: -status.importances.get(key, 0.0))
        table = param_table(status, selected, params.text_width)
        params.set_rows([KeyedRow(key, styled(table.line(key))) for key in keys], [styled(table.header(MUTED))])
        params.set_titles("Parameters by importance" if status.importances else "Parameters")
        key, label = params.selected_key, printable(status.settings.objective.label)
        # Of a trial that runs, the time alone changes.
        drawn = (status.curves, status.counts, status.best, number, key, self._whole)
        if selected is None or key is None or drawn == self._drawn:
            return
        self._drawn = drawn
        curves, window = trial_curves(status, selected)
        note = f"best {len(curves)} trials" if len(curves) < len(status.trials) else ""
        chart = self.query_one("#trial-curves", ChartPanel)
        subject = "" if self.has_class("-narrow") else f"{label}: "
        chart.rename(escape_markup(f"{subject}trial {selected.number}, others dashed"))
        chart.draw(curves, replace(window, whole=self._whole), note)
        points, axis = param_curves(status, key)
        cursor = axis_position(status.settings.spaces()[key], selected.params[key]) if key in selected.params else None
        chart = self.query_one("#param-chart", ChartPanel)
        chart.rename(escape_markup(f"{label} by {key}"))
        chart.draw(points, replace(axis, whole=self._whole), f"│ trial {selected.number}  ★ best", cursor)

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if (status := self.sweep_poller.value) is not None:
            self._draw_selected(status)

    def is_available(self, action: str) -> bool:
        status = self.sweep_poller.value
        if action == "stop":
            return status is not None and status.running
        if action == "resume":
            return status is not None and status.state == "not running"
        if action == "again":
            return status is not None and status.best is not None
        return bool(status and status.trials) or action not in TRIAL_ACTIONS

    # Commands

    def _path(self, number: int) -> str:
        return str(self.folder.trial(number).path)

    def action_open(self) -> None:
        """Open the run of the trial under the cursor."""
        key = self._trials.selected_key
        if key is None:
            return
        run = self.folder.trial(int(key))
        if run.path.is_dir():
            self.gputrain_app.open_run(str(run.path))

    def action_select(self) -> None:
        """Select the trial under the cursor, or undo that."""
        marked, key = self.gputrain_app.marked_runs, self._trials.selected_key
        if key is not None:
            path = self._path(int(key))
            marked.pop(path) if path in marked else marked.setdefault(path)
            self.update_content()
            self._trials.action_move(1)

    def action_whole_range(self) -> None:
        self._whole = not self._whole
        self.update_content()

    def action_compare(self) -> None:
        """Compare the runs of the selected trials."""
        status, marked = self.sweep_poller.value, self.gputrain_app.marked_runs
        paths = [self._path(row.number) for row in status.by_value()] if status is not None else []
        chosen = [Path(path) for path in paths if path in marked]
        if len(chosen) < 2:
            self.gputrain_app.show_toast("Select two trials or more with space to compare them")
        else:
            self.gputrain_app.open_compare(chosen)

    def action_again(self) -> None:
        """Start the best trial again: its config for longer, or the command of its script."""
        status = self.sweep_poller.value
        if status is None or status.best is None:
            return
        from engine.jobs.sweeps.best import longer_arguments

        if status.settings.command:
            RunChanges(self.gputrain_app, self).again(self.folder.trial(status.best.number))
            return
        arguments = longer_arguments(self.folder, status.best.params)
        start = partial(self.gputrain_app.launch, [*arguments, "--headless"])
        question = f"Train the config of trial {status.best.number} for longer?"
        confirm(self.app, question, "Do not start", "Start", start, f"gputrain {shlex.join(arguments)}")

    def action_resume(self) -> None:
        """Start the controller again, in the background."""
        app, words = self.gputrain_app, ("sweep", "resume", self.folder.name, "--detach")
        done = f"{printable(self.folder.name)} goes on in the background"
        self.act(partial(call_gputrain, words, app.runs_dir), lambda _: app.show_toast(done), in_thread=True)

    def action_stop(self) -> None:
        """Ask the controller to stop the sweep."""
        status = self.sweep_poller.value
        is_script = status is not None and bool(status.settings.command)
        effect = "The commands of its trials are ended" if is_script else "Its trials save a checkpoint first"
        question = f"Stop the sweep {printable(self.folder.name)}? {effect}."
        done = f"Sent the stop request to {self.folder.name}"
        send = partial(stop_sweep, self.folder)
        stop = partial(self.act, send, lambda _: self.gputrain_app.show_toast(done))
        confirm(self.app, question, "Keep it running", "Stop", stop)
