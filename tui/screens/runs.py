"""The list of all runs in the runs folder: marks, filter, order and columns, with a preview of the selected run.

`engine.runs.run_view` filters and sorts, `tui.tables.runs` makes the lines, and `tui.screens.run_changes` changes runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import get_current_worker

from engine.runs.columns import column_choices, known_columns
from engine.runs.control import send_request
from engine.runs.fields import Field
from engine.runs.folder import RunFolder, RunState
from engine.runs.metric_directions import read_directions
from engine.runs.query import Query, SortOrder, parse_query
from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow
from engine.runs.run_view import OwnMetricsFinder, RunView, ViewRequest, make_view, query_of, same_rows
from engine.runs.trials import best_trial
from engine.show.table import FittedTable
from engine.utils import codec
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from tui.keymap import RUNS_COMMANDS, Command
from tui.list_settings import ListSettings, read_list_settings, save_list_settings
from tui.palette import MUTED
from tui.phrases import note
from tui.screens.base import AppServices, Filter, GputrainScreen
from tui.screens.dialogs import stop_dialog
from tui.screens.run_changes import RunChanges
from tui.screens.run_filter import RunFilter
from tui.screens.run_marks import RunMarks
from tui.screens.runs_layout import list_height
from tui.tables import styled
from tui.tables.runs import DEFAULT_COLUMNS, fit_run_list, run_list_line
from tui.widgets.lines import LazyRows, Lines, escape_markup
from tui.widgets.preview import Preview

# More rows are filtered and sorted in a thread: 2,000 take 5 ms.
MAX_INLINE_ROWS = 2000
# While thousands of runs are read, more of them are shown as often as this.
READING_SECONDS = 0.5
# The order without a chosen one.
NEWEST_FIRST = "started_at"
NOT_OF_SWEEP = ("again", "note", "rename")
ONE_RUN_ACTIONS = ("open", "again", "compare", "mark", "tags", "note", "rename", "archive", "delete")


class RunsScreen(GputrainScreen):
    """A table of all runs that can be marked, filtered, sorted, opened, labelled and deleted."""

    CSS_PATH = "runs.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = RUNS_COMMANDS
    SHOWS_RUNS = True

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._settings = read_list_settings()
        self._changes, self._marks = RunChanges(app, self), RunMarks(app)
        self._opened: frozenset[str] = frozenset()
        self._full = self._archived = self._waits_for_rows = self._has_rows = False
        self._query, self._query_text, self._problem = parse_query(""), "", ""
        self._requested: ViewRequest | None = None
        self._view = RunView(ViewRequest(()))
        self._table: tuple[tuple[object, ...], FittedTable[RunRow]] | None = None
        self._fields: list[Field] = []
        self._own_metrics = OwnMetricsFinder()
        self._order: SortOrder | None = None
        self._drawn_order: SortOrder | None = None

    def on_mount(self) -> None:
        self.run_worker(self._load_fields, thread=True)

    def make_filter(self) -> Filter:
        return RunFilter(self.gputrain_app.run_filters)

    def compose_body(self) -> ComposeResult:
        with Container(id="runs-body"):
            runs = Lines(selectable=True, id="all-runs")
            runs.set_titles("Runs")
            yield runs
            yield Preview(id="run-preview")

    # Content

    @property
    def has_content(self) -> bool:
        return self._has_rows

    def update_content(self) -> None:
        self._request_view()
        self._draw()
        self.show_title(f"runs in {self.gputrain_app.runs_dir}")
        poller = self.gputrain_app.run_list_poller
        if poller.rows is not None and not poller.complete and not self._waits_for_rows:
            self._waits_for_rows = True
            self.set_timer(READING_SECONDS, self._show_more_rows)

    def _show_more_rows(self) -> None:
        self._waits_for_rows = False
        self.update_if_on_top()

    def _load_fields(self) -> None:
        """Resolve the columns, in a thread: the config schema takes 0.3 s to import."""
        self._own_metrics.directions = directions = read_directions(self.gputrain_app.runs_dir)
        self._fields = known_columns(self._settings.columns or DEFAULT_COLUMNS, directions)
        name = self._settings.sort_key
        known = known_columns([name] if name is not None else [], directions)
        self._order = SortOrder(known[0], self._settings.reverse) if known else None
        # So that the first line needs no import.
        default_values()
        self.app.call_from_thread(self.update_if_on_top)

    def _request_view(self) -> None:
        """Filter and sort the rows if anything has changed. What is shown stays while the filter has a mistake."""
        text = self.query_one(Filter).value.strip()
        rows = self.gputrain_app.run_list_poller.rows or []
        own = self._own_metrics.find(rows)
        query = query_of(text, own)
        self._problem = query if isinstance(query, str) else ""
        if isinstance(query, Query):
            self._query, self._query_text = query, text
        minute = int(time.time() / 60) if "age" in self._query.fields else 0
        request = ViewRequest(rows, self._query_text, self._order, self._archived, minute, self._opened, own)
        before = self._requested
        if before is not None and replace(before, rows=rows) == request and same_rows(before.rows, rows):
            return
        self._requested = request
        if len(rows) <= MAX_INLINE_ROWS:
            self._view = make_view(request, self._query, self._view)
        else:
            query, shown = self._query, self._view

            def work() -> None:
                worker, view = get_current_worker(), make_view(request, query, shown)
                if not worker.is_cancelled:
                    self.app.call_from_thread(self._show_view, view)

            # Not a partial: Textual logs the repr of the function, and that of a partial contains all rows.
            self.run_worker(work, thread=True, group="view", exclusive=True)

    def _show_view(self, view: RunView) -> None:
        if view.request is self._requested:
            self._view = view
            self._draw()
            self.update_keys()

    def _draw(self) -> None:
        self._divide_room(len(self._view.shown))
        self._show_rows()
        self._show_selected()

    def _show_rows(self) -> None:
        """Draw the rows of the list. Only the text of those that are visible is made."""
        lines, view = self.query_one("#all-runs", Lines), self._view
        table = self._fit_table(lines.text_width)

        def line(index: int) -> Text:
            return styled(run_list_line(table, view.shown[index]))

        lines.set_rows(LazyRows(view.keys, line), [styled(table.header(MUTED))], self._empty_text())
        poller = self.gputrain_app.run_list_poller
        # Of a list that is being read, keys need a page.
        is_read = poller.rows is not None and (poller.complete or len(poller.rows) >= lines.size.height)
        self._has_rows = self._has_rows or (is_read and view.request is self._requested)
        if view.request.order is not self._drawn_order:
            self._drawn_order = view.request.order
            lines.scroll_to_cursor()

    def _fit_table(self, width: int) -> FittedTable[RunRow]:
        """Return the table of all rows, so that it stays the same while a filter is typed."""
        request, fields = self._view.request, self._fields
        with_message = not self.query_one(Preview).display
        key = (request.rows, width, fields, request.order, with_message)
        if self._table is None or not all(map(is_, self._table[0], key)):
            table = fit_run_list(
                request.rows, width, fields, request.order, with_message=with_message,
                is_marked=lambda row: self._marks.contain(self._view.runs_of(row)),
                is_opened=lambda row: row.name in self._opened,
            )  # fmt: skip
            self._table = key, table
        return self._table[1]

    def _empty_text(self) -> Text:
        poller = self.gputrain_app.run_list_poller
        if (problem := poller.problem or poller.unexpected_error) is not None:
            return Text(printable(str(problem)), MUTED)
        if poller.rows is None:
            return Text("Loading …", MUTED)
        if self._view.request.query:
            return Text(f"No run matches '{printable(self._view.request.query)}'; press esc to show all runs", MUTED)
        if self._view.hidden:
            return Text(f"All {pluralize(self._view.hidden, 'run')} are archived; press H to show them", MUTED)
        return Text("No runs yet; press n to start one", MUTED)

    def _divide_room(self, runs: int) -> None:
        """Divide the height between the list and the preview below it."""
        room = self.query_one("#runs-body").size.height
        height = list_height(room, runs, full=self._full)
        lines, preview = self.query_one("#all-runs", Lines), self.query_one(Preview)
        lines.styles.height = height if height < room else "1fr"
        preview.display = height < room

    def _show_selected(self) -> None:
        """Show the selected run in the preview; without a preview, what must be known of it below the list."""
        row, preview, lines = self._selected_row(), self.query_one(Preview), self.query_one("#all-runs", Lines)
        subtitle = "" if row is None or preview.display else note(row)
        room = max(lines.text_width - 4, 0)
        subtitle = subtitle if len(subtitle) <= room else subtitle[: room - 1] + "…"
        lines.set_titles(self._title(), escape_markup(subtitle))
        preview.show_run(best_trial(self._view.runs_of(row)) if row is not None else None)

    def _title(self) -> str:
        """Return the mistake in the filter, else how many runs there are, as markup."""
        if self._problem:
            return f"[$warning]{escape_markup(printable(self._problem))}[/]"
        poller = self.gputrain_app.run_list_poller
        if poller.rows is None:
            return "Runs"
        if not poller.complete and poller.problem is None:
            return f"{len(poller.rows):,} of {poller.count:,} runs read …"
        marked = len(self._marked_rows())
        return escape_markup(self._view.count_text) + (f", [$accent]{marked} marked[/]" if marked else "")

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._show_selected()
        self.update_keys()

    # Runs that a command is about

    def _selected_row(self) -> RunRow | None:
        lines = self.query_one("#all-runs", Lines)
        index = lines.selected_index
        return self._view.shown[index] if index is not None and index < len(self._view.shown) else None

    def _marked_rows(self) -> list[RunRow]:
        """Return the rows of the marked runs that exist."""
        return self._marks.rows(self.gputrain_app.run_list_poller.rows or ())

    def _target_rows(self) -> list[RunRow]:
        """Return the marked runs, else the selected one."""
        row = self._selected_row()
        return self._marked_rows() or (self._view.runs_of(row) if row is not None else [])

    def is_available(self, action: str) -> bool:
        row = self._selected_row()
        if action in ("stop", "resume"):
            return row is not None and not row.trials and row.live is (action == "stop")
        if row is not None and row.trials and action in NOT_OF_SWEEP:
            return False
        return row is not None or action not in ONE_RUN_ACTIONS

    def title_of(self, command: Command) -> str:
        if command.action == "archived" and self._archived:
            return "hide archived"
        if command.action == "archive" and all(row.archived for row in self._target_rows()):
            return "unarchive"
        return command.title

    # Commands

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Open the run, or show or hide the trials of the sweep."""
        row = self._selected_row()
        if row is not None and row.trials:
            self._opened ^= {row.name}
            self.update_content()
        elif row is not None:
            self.gputrain_app.open_run(row.folder)

    def action_mark(self) -> None:
        if (row := self._selected_row()) is None:
            return
        self._marks.toggle(self._view.runs_of(row))
        self._show_rows()
        self.query_one("#all-runs", Lines).action_move(1)
        self._show_selected()

    def action_mark_all(self) -> None:
        self._marks.toggle(self._view.matching)
        self._draw()

    def action_compare(self) -> None:
        """Compare the marked runs."""
        rows = self._marked_rows()
        if len(rows) < 2:
            self.gputrain_app.show_toast("Mark two runs or more with space to compare them")
        else:
            self.gputrain_app.open_compare([Path(row.folder) for row in rows])

    def action_full(self) -> None:
        self._full = not self._full
        self.update_content()
        # The size of the list follows in the next refresh.
        self.call_after_refresh(self.update_if_on_top)

    def action_archived(self) -> None:
        self._archived = not self._archived
        self.update_content()

    def action_order(self) -> None:
        """Choose the column to sort by."""
        from tui.screens.columns import SortDialog

        order = self._order
        names = [NEWEST_FIRST, "name", *(field.name for field in self._fields)]
        choices = column_choices(self._view.request.rows, names)

        def sort_by(name: str | None) -> None:
            if name is not None:
                reverse = order is not None and name == order.field.name and not order.reverse
                self._change_settings(codec.replace(self._settings, sort_key=name, reverse=reverse))

        dialog = SortDialog(choices, order or SortOrder.parse(NEWEST_FIRST))
        self.app.push_screen(dialog, sort_by)

    def action_columns(self) -> None:
        """Choose the columns."""
        from tui.screens.columns import ColumnsDialog

        chosen = [field.name for field in self._fields]
        choices = column_choices(self._view.request.rows, chosen)

        def show(names: list[str] | None) -> None:
            if names is not None:
                columns = () if tuple(names) == DEFAULT_COLUMNS else tuple(names)
                self._change_settings(codec.replace(self._settings, columns=columns))

        dialog = ColumnsDialog(choices, chosen, DEFAULT_COLUMNS)
        self.app.push_screen(dialog, show)

    def _change_settings(self, settings: ListSettings) -> None:
        self._settings = settings
        self.run_worker(self._load_fields, thread=True)
        self.act(partial(save_list_settings, settings))

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

        self.app.push_screen(stop_dialog(f"Stop {printable(folder.name)}? It saves a checkpoint first."), answer)

    def action_resume(self) -> None:
        if (row := self._selected_row()) is not None:
            self.gputrain_app.resume_run(RunFolder(Path(row.folder)), RunState(row.state))

    def action_sweep(self) -> None:
        row = self._selected_row()
        self.gputrain_app.open_sweep(row.name if row is not None else "")

    def action_again(self) -> None:
        if (row := self._selected_row()) is not None:
            self.gputrain_app.open_form(RunFolder(Path(row.folder)).config)

    def action_tags(self) -> None:
        self._changes.tags(self._target_rows())

    def action_note(self) -> None:
        self._changes.note(self._selected_row())

    def action_rename(self) -> None:
        self._changes.rename(self._selected_row())

    def action_delete(self) -> None:
        self._changes.delete(self._target_rows())

    def action_trash(self) -> None:
        from tui.screens.trash import TrashScreen

        self.app.push_screen(TrashScreen(self.gputrain_app))

    def action_archive(self) -> None:
        self._changes.archive(self._target_rows())
