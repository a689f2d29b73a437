"""All runs, with their states and results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.control import send_request
from engine.runs.folder import RunFolder, State
from engine.utils.errors import UsageError
from engine.utils.text import counted, printable
from tui.keymap import RUNS, Command
from tui.screens.base import CockpitScreen
from tui.screens.dialogs import stop_question
from tui.text.palette import MUTED
from tui.text.run_lines import name_columns, table_head, table_line
from tui.widgets.lines import Lines, Row


class RunsScreen(CockpitScreen):
    COMMANDS_HERE: ClassVar[Sequence[Command]] = RUNS
    SHOWS_RUNS = True

    def body(self) -> ComposeResult:
        lines = Lines(choosing=True, id="all-runs")
        lines.border_title = "Runs"
        yield lines

    def tick(self) -> None:
        lines = self.query_one("#all-runs", Lines)
        rows, wanted = self.cockpit.run_list_poller.rows, self.filter_text
        empty = Text(
            printable(self.cockpit.run_list_poller.problem or self.cockpit.run_list_poller.fault or "")
            or ("looking …" if rows is None else "no run holds this text" if wanted else "no runs yet; n starts one"),
            MUTED,
        )
        shown = [row for row in rows or [] if wanted in row.name.lower() or wanted in row.state]
        room = lines.size.width
        width = name_columns(shown, room)
        lines.show([Row(row.folder, table_line(row, width, room)) for row in shown], [table_head(width, room)], empty)
        self.show_title(f"runs in {self.cockpit.runs_dir}", f"{counted(len(shown), 'run')} ")

    def _chosen(self) -> tuple[RunFolder, State] | None:
        key = self.query_one("#all-runs", Lines).key
        found = [row for row in self.cockpit.run_list_poller.rows or [] if row.folder == key]
        return (RunFolder(Path(found[0].folder)), State(found[0].state)) if found else None

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.cockpit.open_run(event.key)

    def action_open(self) -> None:
        if (chosen := self._chosen()) is not None:
            self.cockpit.open_run(str(chosen[0].path))

    def action_stop(self) -> None:
        if (chosen := self._chosen()) is None:
            return
        folder, state = chosen
        if not state.live:
            self.cockpit.show_toast(f"{folder.name} is not running, it is {state}", warning=True)
            return

        def answer(key: str | None) -> None:
            if key != "yes":
                return
            try:
                send_request(folder.control, "stop")
                self.cockpit.show_toast(f"{folder.name} is asked to stop")
            except UsageError as error:
                self.cockpit.show_toast(str(error), warning=True)

        self.app.push_screen(stop_question(f"Stop {printable(folder.name)}? It saves a checkpoint."), answer)

    def action_resume(self) -> None:
        if (chosen := self._chosen()) is not None:
            self.cockpit.resume_run(*chosen)

    def action_again(self) -> None:
        if (chosen := self._chosen()) is not None:
            self.cockpit.open_form(chosen[0].config)
