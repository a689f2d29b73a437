"""The list of all runs in the runs folder, with their state and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.control import send_request
from engine.runs.folder import RunFolder, RunState
from engine.utils.errors import UsageError
from engine.utils.text import pluralize, printable
from tui.keymap import RUNS_COMMANDS, Command
from tui.palette import MUTED
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import stop_dialog
from tui.text.run_lines import name_columns, table_header, table_line
from tui.widgets.lines import Lines, Row


class RunsScreen(GputrainScreen):
    """A table of all runs that can be filtered, opened, stopped, resumed and repeated."""

    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = RUNS_COMMANDS
    SHOWS_RUNS = True

    def compose_body(self) -> ComposeResult:
        lines = Lines(selectable=True, id="all-runs")
        lines.border_title = "Runs"
        yield lines

    def update_content(self) -> None:
        lines = self.query_one("#all-runs", Lines)
        rows, query = self.gputrain_app.run_list_poller.rows, self.filter_text
        empty = Text(
            printable(
                self.gputrain_app.run_list_poller.problem or self.gputrain_app.run_list_poller.unexpected_error or ""
            )
            or (
                "Loading …"
                if rows is None
                else "No run matches the filter"
                if query
                else "No runs yet; press n to start one"
            ),
            MUTED,
        )
        shown = [row for row in rows or [] if query in row.name.lower() or query in row.state]
        room = lines.text_width
        width = name_columns(shown, room)
        lines.set_rows(
            [Row(row.folder, table_line(row, width, room)) for row in shown], [table_header(width, room)], empty
        )
        self.show_title(f"runs in {self.gputrain_app.runs_dir}", f"{pluralize(len(shown), 'run')} ")

    def _selected_run(self) -> tuple[RunFolder, RunState] | None:
        key = self.query_one("#all-runs", Lines).selected_key
        matches = [row for row in self.gputrain_app.run_list_poller.rows or [] if row.folder == key]
        return (RunFolder(Path(matches[0].folder)), RunState(matches[0].state)) if matches else None

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.gputrain_app.open_run(event.key)

    def action_open(self) -> None:
        if (selected := self._selected_run()) is not None:
            self.gputrain_app.open_run(str(selected[0].path))

    def action_stop(self) -> None:
        if (selected := self._selected_run()) is None:
            return
        folder, state = selected
        if not state.live:
            self.gputrain_app.show_toast(f"{folder.name} is not running: it is {state}", warning=True)
            return

        def answer(key: str | None) -> None:
            if key != "yes":
                return
            try:
                send_request(folder.control, "stop")
                self.gputrain_app.show_toast(f"Sent the stop request to {folder.name}")
            except UsageError as error:
                self.gputrain_app.show_toast(str(error), warning=True)

        self.app.push_screen(stop_dialog(f"Stop {printable(folder.name)}? It saves a checkpoint first."), answer)

    def action_resume(self) -> None:
        if (selected := self._selected_run()) is not None:
            self.gputrain_app.resume_run(*selected)

    def action_again(self) -> None:
        if (selected := self._selected_run()) is not None:
            self.gputrain_app.open_form(selected[0].config)
