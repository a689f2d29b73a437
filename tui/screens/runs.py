"""The list of all runs in the runs folder, with their state and results, and a preview of the selected one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.runs.control import send_request
from engine.runs.folder import RunFolder, RunState
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError
from engine.utils.text import pluralize, printable
from tui.keymap import RUNS_COMMANDS, Command
from tui.palette import MUTED
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import stop_dialog
from tui.text.preview import change_lines, figure_lines
from tui.text.run_lines import RunTable, note
from tui.widgets.lines import Lines, Row, escape_markup
from tui.widgets.preview import Preview

# Wide enough for the preview beside the list, high enough for it below the list.
MIN_BESIDE_COLUMNS, MIN_BELOW_ROWS = 112, 32
# Header and frame of the list, and the rows that figures and config keys, or a preview, need below it.
LIST_FRAME_ROWS, MIN_DETAIL_ROWS, MIN_PREVIEW_ROWS = 3, 18, 10


class RunsScreen(GputrainScreen):
    """A table of all runs that can be filtered, opened, stopped, resumed and repeated."""

    CSS_PATH = "runs.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = RUNS_COMMANDS
    SHOWS_RUNS = True

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (MIN_BESIDE_COLUMNS, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (MIN_BELOW_ROWS, "-high")]
        self._count = ""

    def compose_body(self) -> ComposeResult:
        with Container(id="runs-body"):
            with Container(id="runs-left"):
                runs = Lines(selectable=True, id="all-runs")
                runs.set_titles("Runs")
                yield runs
                yield Lines(id="run-details")
            yield Preview(id="run-preview")

    def update_content(self) -> None:
        lines, poller, query = self.query_one("#all-runs", Lines), self.gputrain_app.run_list_poller, self.filter_text
        rows = poller.rows
        shown = [row for row in rows or [] if query in row.name.lower() or query in row.state]
        table = RunTable.fit(shown, lines.text_width, with_message=not self.has_class("-wide"))
        texts = [Row(row.folder, partial(table.line, row)) for row in shown]
        lines.set_rows(texts, [table.header], self._empty_text(query))
        count = pluralize(len(shown), "run")
        if query:
            count = f"{len(shown)} of {len(rows or [])} match '{printable(query)}'"
        self._count = count if rows is not None else "Runs"
        self._arrange(len(shown))
        self._show_selected()
        self.show_title(f"runs in {self.gputrain_app.runs_dir}")

    def _empty_text(self, query: str) -> Text:
        poller = self.gputrain_app.run_list_poller
        if (problem := poller.problem or poller.unexpected_error) is not None:
            return Text(printable(problem), MUTED)
        if poller.rows is None:
            return Text("Loading …", MUTED)
        if query:
            return Text(f"No run matches '{printable(query)}'; press esc to show all runs", MUTED)
        return Text("No runs yet; press n to start one", MUTED)

    def _arrange(self, runs: int) -> None:
        """Show figures and config keys below a list that leaves room for them, else in the preview. In a narrow
        terminal, the preview is below the list."""
        lines, details = self.query_one("#all-runs", Lines), self.query_one("#run-details", Lines)
        height = runs + LIST_FRAME_ROWS
        room = self.query_one("#runs-left").size.height - height
        below = self.has_class("-wide") and runs > 0 and room >= MIN_DETAIL_ROWS
        if details.display != below:
            details.display = below
            self.query_one(Preview).with_text = not below
        room = self.query_one("#runs-body").size.height - height
        high = self.has_class("-high")
        stacked = self.has_class("-narrow") and runs > 0 and (high or room >= MIN_PREVIEW_ROWS)
        self.set_class(stacked, "-stacked")
        if stacked and high:
            height = min(height, self.size.height // 3)
        lines.styles.height = height if below or stacked else "1fr"

    def _show_selected(self) -> None:
        """Show the selected run in the preview. A narrow one has no room for the message of the run."""
        row, preview, lines = self._selected_row(), self.query_one(Preview), self.query_one("#all-runs", Lines)
        subtitle = "" if row is None or self.has_class("-wide") else note(row)
        room = max(lines.text_width - 4, 0)
        subtitle = subtitle if len(subtitle) <= room else subtitle[: room - 1] + "…"
        lines.set_titles(escape_markup(self._count), escape_markup(subtitle))
        preview.show_run(row)

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._show_selected()
        self.update_keys()

    def on_preview_drawn(self) -> None:
        details, row = self.query_one("#run-details", Lines), self._selected_row()
        preview = self.query_one(Preview).preview
        if not details.display or row is None:
            return
        changes = [Text(""), *change_lines(preview.changes, details.text_width)] if preview is not None else []
        details.set_titles(escape_markup(printable(row.name)))
        details.set_texts([*figure_lines(row, preview, details.text_width), *changes])

    def _selected_row(self) -> RunRow | None:
        key = self.query_one("#all-runs", Lines).selected_key
        return next((row for row in self.gputrain_app.run_list_poller.rows or [] if row.folder == key), None)

    def is_available(self, action: str) -> bool:
        if action not in ("open", "stop", "resume", "again"):
            return True
        row = self._selected_row()
        return row is not None and (action in ("open", "again") or row.live is (action == "stop"))

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.gputrain_app.open_run(event.key)

    def action_open(self) -> None:
        if (row := self._selected_row()) is not None:
            self.gputrain_app.open_run(row.folder)

    def action_stop(self) -> None:
        if (row := self._selected_row()) is None:
            return
        folder, state = RunFolder(Path(row.folder)), RunState(row.state)
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
        if (row := self._selected_row()) is not None:
            self.gputrain_app.resume_run(RunFolder(Path(row.folder)), RunState(row.state))

    def action_again(self) -> None:
        if (row := self._selected_row()) is not None:
            self.gputrain_app.open_form(RunFolder(Path(row.folder)).config)
