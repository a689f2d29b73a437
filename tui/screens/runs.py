"""The list of all runs in the runs folder: labels, archive, deletion, and what starts, stops and resumes runs.

`tui.screens.run_table` shows the rows, and `tui.screens.run_changes` changes runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from engine.runs.columns import ColumnChoice, column_choices, command_columns, commands_metrics
from engine.runs.control import send_request
from engine.runs.folder import RunFolder, RunState
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import Better
from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow
from engine.utils.errors import Problem
from engine.utils.text import printable
from tui.keymap import RUNS_KEYS, Key
from tui.list_settings import SETTINGS_FILE
from tui.screens.base import AppServices, Filter
from tui.screens.dialogs import stop_dialog
from tui.screens.run_changes import RunChanges
from tui.screens.run_table import RunTableScreen
from tui.tables.runs import DEFAULT_COLUMNS, NUM_FIRST_COLUMNS
from tui.widgets.preview import Preview

FILTER_HINT = "failed optim.name=adamw val_accuracy>0.9 -tag=old; enter keeps it, esc clears it"
NOT_OF_SWEEP = ("again", "note")
ONE_RUN_ACTIONS = ("open", "again", "compare", "mark", "tags", "note", "archive", "delete")


class RunsScreen(RunTableScreen):
    """A table of all runs that can be marked, filtered, sorted, opened, labelled and deleted."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = RUNS_KEYS
    SHOWS_RUNS = True
    SETTINGS_FILE = SETTINGS_FILE
    DEFAULT_ORDER = "started_at"

    def __init__(self, app: AppServices) -> None:
        super().__init__(app, app.run_list_poller, app.marked_runs)
        self._changes = RunChanges(app, self)

    @property
    def heading(self) -> str:
        return f"runs in {self.gputrain_app.runs_dir}"

    @property
    def default_columns(self) -> tuple[str, ...]:
        rows = self.row_poller.rows or ()
        if rows and all(row.record.command for row in rows):
            return command_columns(rows)
        first, rest = DEFAULT_COLUMNS[:NUM_FIRST_COLUMNS], DEFAULT_COLUMNS[NUM_FIRST_COLUMNS:]
        return tuple(dict.fromkeys((*first, *commands_metrics(rows), *rest)))

    @property
    def reading_text(self) -> str:
        poller = self.gputrain_app.run_list_poller
        return f"{len(poller.rows or ()):,} of {poller.count:,} runs read …"

    @property
    def no_runs_text(self) -> str:
        return "No runs yet; press n to start one"

    def make_filter(self) -> Filter:
        return Filter(placeholder=FILTER_HINT)

    def make_preview(self) -> Preview:
        return Preview(id="run-preview")

    def preview_run(self, row: RunRow | None) -> None:
        self.query_one(Preview).show_run(row)

    def read_directions(self) -> Mapping[str, Better]:
        # So that the first line needs no import.
        default_values()
        return read_directions(self.gputrain_app.runs_dir)

    def find_choices(self, first: Sequence[str]) -> list[ColumnChoice]:
        return column_choices(self._view.request.rows, first)

    def open_row(self, row: RunRow) -> None:
        """Open the run, or show or hide the trials of the sweep."""
        if row.trials:
            self._opened ^= {row.name}
            self.update_content()
        else:
            self.gputrain_app.open_run(row.folder)

    def is_available(self, action: str) -> bool:
        row = self._selected_row()
        if action in ("stop", "resume"):
            is_over = row is not None and row.state == RunState.FINISHED and bool(row.record.command)
            return row is not None and not row.trials and row.live is (action == "stop") and not is_over
        if row is not None and row.trials and action in NOT_OF_SWEEP:
            return False
        return row is not None or action not in ONE_RUN_ACTIONS

    def title_of(self, key: Key) -> str:
        if key.action == "archived" and self._archived:
            return "hide archived"
        if key.action == "archive" and all(row.archived for row in self._target_rows()):
            return "unarchive"
        return key.title

    # Commands

    def action_compare(self) -> None:
        """Compare the marked runs."""
        rows = self._marked_rows()
        if len(rows) < 2:
            self.gputrain_app.show_toast("Mark two runs or more with space to compare them")
        else:
            self.gputrain_app.open_compare([Path(row.folder) for row in rows])

    def action_archived(self) -> None:
        self._archived = not self._archived
        self.update_content()

    def action_stop(self) -> None:
        if (row := self._selected_row()) is None:
            return
        folder, state = RunFolder(Path(row.folder)), RunState(row.state)
        if not state.live:
            self.gputrain_app.show_toast(Problem("", f"{row.name} is not running: it is {state}", code="not-running"))
            return

        def answer(key: str | None) -> None:
            if key == "yes":
                done = f"Sent the stop request to {folder.name}"
                self.act(partial(send_request, folder.control, "stop"), lambda _: self.gputrain_app.show_toast(done))

        result = "All that its command started ends." if row.record.command else "It saves a checkpoint first."
        self.app.push_screen(stop_dialog(f"Stop {printable(folder.name)}? {result}"), answer)

    def action_resume(self) -> None:
        if (row := self._selected_row()) is not None:
            self.gputrain_app.resume_run(RunFolder(Path(row.folder)), RunState(row.state))

    def action_sweep(self) -> None:
        row = self._selected_row()
        self.gputrain_app.open_sweep(row.name if row is not None else "")

    def action_again(self) -> None:
        from tui.screens.command_dialog import ask_command

        row = self._selected_row()
        if row is not None and row.record.command:
            folder = RunFolder(Path(row.folder))
            self.act(lambda: ask_command(self.app, self.gputrain_app, folder))
        elif row is not None:
            self.gputrain_app.open_form(RunFolder(Path(row.folder)).config)

    def action_tags(self) -> None:
        self._changes.tags(self._target_rows())

    def action_note(self) -> None:
        self._changes.note(self._selected_row())

    def action_delete(self) -> None:
        self._changes.delete(self._target_rows())

    def action_archive(self) -> None:
        self._changes.archive(self._target_rows())
