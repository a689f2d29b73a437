"""The screen of a sweep: its trials, live, the best value first.

`tui.pollers.files` reads the sweep; each trial opens as a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.control import send_request
from engine.runs.folder import sweep_of_trial
from engine.sweeps.folder import LAST_SWEEP, SweepFolder, find_sweep, list_sweeps
from engine.utils.errors import Problem, UsageError
from engine.utils.text import printable
from tui.keymap import SWEEP_KEYS, Key
from tui.palette import BAD, MUTED
from tui.pollers.files import watch_sweep
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import confirm
from tui.tables import styled
from tui.tables.sweeps import status_line, trial_table
from tui.widgets.lines import LazyRows, Lines
from tui.widgets.text_line import TextLine

if TYPE_CHECKING:
    from engine.sweeps.status import SweepStatus


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
    """The trials of one sweep."""

    CSS_PATH = "sweep.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = SWEEP_KEYS

    def __init__(self, app: AppServices, folder: SweepFolder, trial: int | None = None) -> None:
        """`trial` is the number of the trial to select."""
        super().__init__(app)
        self._selected = trial
        self.folder = folder
        self.sweep_poller = self.follow(watch_sweep(folder, app.intervals.poll_s))

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="sweep-status")
        yield Lines(selectable=True, id="trials", empty_text=Text("No trial has begun", MUTED))

    def on_mount(self) -> None:
        self.query_one("#trials").focus()

    def update_content(self) -> None:
        status, problem = self.sweep_poller.value, self.sweep_poller.problem or self.sweep_poller.unexpected_error
        self.show_title(f"sweep {printable(self.folder.name)}")
        if problem is not None:
            self.show_line("#sweep-status", Text(f" {printable(str(problem))}", BAD, no_wrap=True, end=""))
        elif status is None:
            is_gone = self.sweep_poller.has_polled
            missing = f" {self.folder.settings} does not exist anymore" if is_gone else " Loading …"
            self.show_line("#sweep-status", Text(printable(missing), MUTED, no_wrap=True, end=""))
        else:
            self.show_line("#sweep-status", status_line(status))
            self._draw_status(status)

    def _draw_status(self, status: SweepStatus) -> None:
        trials = self.query_one("#trials", Lines)
        rows = status.by_value()
        table = trial_table(status, trials.text_width)
        header = styled(table.header(MUTED))
        keys = [str(row.number) for row in rows]
        trials.set_rows(LazyRows(keys, lambda index: styled(table.line(rows[index]))), [header])
        trials.set_titles("Trials, best value first")
        if self._selected is not None and self._selected < len(rows):
            trials.select_key(str(self._selected))
            self._selected = None

    def is_available(self, action: str) -> bool:
        status = self.sweep_poller.value
        if action == "stop":
            return status is not None and status.running
        return bool(status and status.trials) or action != "open"

    # Commands

    def _selected_run(self) -> str | None:
        key = self.query_one("#trials", Lines).selected_key
        if key is None:
            return None
        run = self.folder.trial(int(key))
        if not run.path.is_dir():
            self.gputrain_app.show_toast(Problem("", f"{run.name} has no folder yet", code="not-found"))
            return None
        return str(run.path)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Open the run of the trial under the cursor."""
        if (run := self._selected_run()) is not None:
            self.gputrain_app.open_run(run)

    def action_stop(self) -> None:
        """Ask the controller to stop the sweep."""
        status = self.sweep_poller.value
        is_script = status is not None and bool(status.settings.command)
        effect = "The commands of its trials are ended" if is_script else "Its trials save a checkpoint first"
        question = f"Stop the sweep {printable(self.folder.name)}? {effect}."
        done = f"Sent the stop request to {self.folder.name}"
        send = partial(send_request, self.folder.control, "stop")
        stop = partial(self.act, send, lambda _: self.gputrain_app.show_toast(done))
        confirm(self.app, question, "Keep it running", "Stop", stop)
