"""A table of runs that can be marked, filtered, sorted and opened, with a preview of the selected one.

`tui.screens.runs` shows the runs of gputrain with it, `tui.screens.foreign_runs` those of other programs.
`engine.runs.run_view` filters and sorts, and `tui.tables.runs` makes the lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import ClassVar, Protocol

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.widget import Widget
from textual.worker import get_current_worker

from engine.runs.columns import ColumnChoice, known_columns
from engine.runs.fields import Field
from engine.runs.metrics import NO_METRICS, Better
from engine.runs.query import Query, parse_query
from engine.runs.run_row import RunRow
from engine.runs.run_view import OwnMetricsFinder, Parameters, RunView, ViewRequest, make_view, query_of, same_rows
from engine.runs.sort_order import SortOrder
from engine.runs.trials import best_trial
from engine.show.table import FittedTable
from engine.utils import codec
from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from tui.list_settings import MAX_COLUMNS, ListSettings, read_list_settings, save_list_settings
from tui.palette import MUTED
from tui.phrases import note
from tui.screens.base import AppServices, Filter, GputrainScreen
from tui.screens.run_marks import RunMarks
from tui.screens.runs_layout import list_height
from tui.tables import styled
from tui.tables.runs import fit_run_list, run_list_line
from tui.widgets.lines import LazyRows, Lines, escape_markup

# More rows are filtered and sorted in a thread: 2,000 take 5 ms.
MAX_INLINE_ROWS = 2000
# While thousands of runs are read, more of them are shown as often as this.
READING_SECONDS = 0.5


class RunRows(Protocol):
    """What publishes the rows: `RunListPoller` or `ForeignRunListPoller`."""

    rows: list[RunRow] | None
    complete: bool
    problem: Problem | None
    unexpected_error: Problem | None


class RunTableScreen(GputrainScreen):
    """A table of runs. A subclass names the rows, the columns, and what a run is opened with."""

    CSS_PATH = "runs.tcss"
    SETTINGS_FILE: ClassVar[str]
    DEFAULT_ORDER: ClassVar[str]
    """The column that the rows are sorted by without a chosen one."""

    def __init__(self, app: AppServices, poller: RunRows, marked: dict[str, None]) -> None:
        super().__init__(app)
        self.row_poller = poller
        self._settings = read_list_settings(self.SETTINGS_FILE)
        self._marks = RunMarks(marked)
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

    # What the list shows

    @property
    def heading(self) -> str:
        """What the screen shows, for its title."""
        raise NotImplementedError

    @property
    def parameters(self) -> Parameters:
        """Names of the parameters of runs of other programs; None for runs of gputrain."""
        return None

    @property
    def default_columns(self) -> tuple[str, ...]:
        """Names of the columns without chosen ones."""
        raise NotImplementedError

    @property
    def reading_text(self) -> str:
        """How many runs have been read, while some have not."""
        raise NotImplementedError

    @property
    def no_runs_text(self) -> str:
        """What an empty list says."""
        raise NotImplementedError

    def make_preview(self) -> Widget:
        """Return the panel with the run under the cursor, whose id is run-preview."""
        raise NotImplementedError

    def preview_run(self, row: RunRow | None) -> None:
        """Show a run in the preview."""
        raise NotImplementedError

    def read_directions(self) -> Mapping[str, Better]:
        """Return which values of the user's own metrics are better. Called in a thread, before the columns are made."""
        return NO_METRICS

    def find_choices(self, first: Sequence[str]) -> list[ColumnChoice]:
        """Return the columns to choose from."""
        raise NotImplementedError

    def open_row(self, row: RunRow) -> None:
        """Open a run."""
        raise NotImplementedError

    def compose_body(self) -> ComposeResult:
        with Container(id="runs-body"):
            runs = Lines(selectable=True, id="all-runs")
            runs.set_titles("Runs")
            yield runs
            yield self.make_preview()

    # Content

    @property
    def has_content(self) -> bool:
        return self._has_rows

    def update_content(self) -> None:
        self._request_view()
        self._draw()
        self.show_title(self.heading)
        poller = self.row_poller
        if poller.rows is not None and not poller.complete and not self._waits_for_rows:
            self._waits_for_rows = True
            self.set_timer(READING_SECONDS, self._show_more_rows)

    def _show_more_rows(self) -> None:
        self._waits_for_rows = False
        self.update_if_on_top()

    def _load_fields(self) -> None:
        """Resolve the columns, in a thread: the config schema takes 0.3 s to import."""
        self.resolve_fields()
        self.app.call_from_thread(self.update_if_on_top)

    def resolve_fields(self) -> None:
        """Find out what the names of the columns and of the order mean."""
        self._own_metrics.directions = directions = self.read_directions()
        self._fields = self._known(self._settings.columns or self.default_columns, directions)
        known = self._known([self._settings.sort_key] if self._settings.sort_key is not None else [], directions)
        self._order = SortOrder(known[0], self._settings.reverse) if known else None

    def _known(self, names: Sequence[str], directions: Mapping[str, Better]) -> list[Field]:
        own = dict(self._own_metrics.find(self.row_poller.rows or ())[0]) if self.parameters is not None else directions
        return known_columns(names, own, self.parameters)

    def _request_view(self) -> None:
        """Filter and sort the rows if anything has changed. What is shown stays while the filter has a mistake."""
        text = self.query_one(Filter).value.strip()
        rows = self.row_poller.rows or []
        (own, arguments), parameters = self._own_metrics.find(rows), self.parameters
        query = query_of(text, own, parameters, arguments)
        self._problem = query if isinstance(query, str) else ""
        if isinstance(query, Query):
            self._query, self._query_text = query, text
        minute = int(time.time() / 60) if "age" in self._query.fields else 0
        request = ViewRequest(
            rows, self._query_text, self._order, self._archived, minute, self._opened, own, parameters, arguments
        )
        before = self._requested
        if before is not None and replace(before, rows=rows) == request and same_rows(before.rows, rows):
            return
        self._requested = request
        if len(rows) <= MAX_INLINE_ROWS:
            self._view = make_view(request, self._query)
        else:
            query = self._query

            def work() -> None:
                worker, view = get_current_worker(), make_view(request, query)
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
        poller = self.row_poller
        # Of a list that is being read, keys need a page.
        is_read = poller.rows is not None and (poller.complete or len(poller.rows) >= lines.size.height)
        self._has_rows = self._has_rows or (is_read and view.request is self._requested)
        if view.request.order is not self._drawn_order:
            self._drawn_order = view.request.order
            lines.scroll_to_cursor()

    def _fit_table(self, width: int) -> FittedTable[RunRow]:
        """Return the table of all rows, so that it stays the same while a filter is typed."""
        request, fields = self._view.request, self._fields
        with_message = not self.query_one("#run-preview").display
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
        poller = self.row_poller
        if (problem := poller.problem or poller.unexpected_error) is not None:
            return Text(printable(str(problem)), MUTED)
        if poller.rows is None:
            return Text("Loading …", MUTED)
        if self._view.request.query:
            return Text(f"No run matches '{printable(self._view.request.query)}'; press esc to show all runs", MUTED)
        if self._view.hidden:
            return Text(f"All {pluralize(self._view.hidden, 'run')} are archived; press H to show them", MUTED)
        return Text(self.no_runs_text, MUTED)

    def _divide_room(self, runs: int) -> None:
        """Divide the height between the list and the preview below it."""
        room = self.query_one("#runs-body").size.height
        height = list_height(room, runs, full=self._full)
        lines, preview = self.query_one("#all-runs", Lines), self.query_one("#run-preview")
        lines.styles.height = height if height < room else "1fr"
        preview.display = height < room

    def _show_selected(self) -> None:
        """Show the selected run in the preview; without a preview, what must be known of it below the list."""
        row, preview, lines = self._selected_row(), self.query_one("#run-preview"), self.query_one("#all-runs", Lines)
        subtitle = "" if row is None or preview.display else note(row)
        room = max(lines.text_width - 4, 0)
        subtitle = subtitle if len(subtitle) <= room else subtitle[: room - 1] + "…"
        lines.set_titles(self._title(), escape_markup(subtitle))
        self.preview_run(best_trial(self._view.runs_of(row)) if row is not None else None)

    def _title(self) -> str:
        """Return the mistake in the filter, else how many runs there are, as markup."""
        if self._problem:
            return f"[$warning]{escape_markup(printable(self._problem))}[/]"
        poller = self.row_poller
        if poller.rows is None:
            return "Runs"
        if not poller.complete and poller.problem is None:
            return self.reading_text
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
        return self._marks.rows(self.row_poller.rows or ())

    def _target_rows(self) -> list[RunRow]:
        """Return the marked runs, else the selected one."""
        row = self._selected_row()
        return self._marked_rows() or (self._view.runs_of(row) if row is not None else [])

    # Commands

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_open()

    def action_open(self) -> None:
        if (row := self._selected_row()) is not None:
            self.open_row(row)

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

    def action_full(self) -> None:
        self._full = not self._full
        self.update_content()
        # The size of the list follows in the next refresh.
        self.call_after_refresh(self.update_if_on_top)

    def action_order(self) -> None:
        """Choose the column to sort by."""
        from tui.screens.columns import SortDialog

        order = self._order
        names = [self.DEFAULT_ORDER, "name", *(field.name for field in self._fields)]
        choices = self.find_choices(names)

        def sort_by(name: str | None) -> None:
            if name is not None:
                reverse = order is not None and name == order.field.name and not order.reverse
                self._change_settings(codec.replace(self._settings, sort_key=name, reverse=reverse))

        dialog = SortDialog(choices, order or SortOrder(self._known([self.DEFAULT_ORDER], NO_METRICS)[0]))
        self.app.push_screen(dialog, sort_by)

    def action_columns(self) -> None:
        """Choose the columns."""
        from tui.screens.columns import ColumnsDialog

        chosen, default = [field.name for field in self._fields], self.default_columns
        choices = self.find_choices(chosen)

        def show(names: list[str] | None) -> None:
            if names is not None:
                # Columns that no run here has stay for other folders.
                offered = {choice.name for choice in choices}
                others = [name for name in self._settings.columns if name not in offered]
                columns = () if tuple(names) == default else (*names, *others)[:MAX_COLUMNS]
                self._change_settings(codec.replace(self._settings, columns=columns))

        dialog = ColumnsDialog(choices, chosen, default)
        self.app.push_screen(dialog, show)

    def _change_settings(self, settings: ListSettings) -> None:
        self._settings = settings
        self.run_worker(self._load_fields, thread=True)
        self.act(partial(save_list_settings, settings, self.SETTINGS_FILE))
