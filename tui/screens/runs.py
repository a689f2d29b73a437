"""The list of runs: those in the runs folder, or those that other programs record, which are only watched.

`tui.screens.pollers.run_lists` reads the rows, `engine.runs.run_view` filters and sorts them, `tui.screens.tables.runs`
makes the lines, and `tui.screens.run_changes` changes runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.worker import get_current_worker

from engine.base.text import list_names, pluralize, printable
from engine.report.table import FittedTable, shorten
from engine.runs.fields import Field
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import NO_METRICS, Better
from engine.runs.query import Query, parse_query
from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow
from engine.runs.run_view import (
    NamesFinder,
    RunView,
    SortOrder,
    ViewRequest,
    commands_metrics,
    known_columns,
    make_view,
    query_of,
    run_columns,
    same_rows,
)
from tui.screens.base import Filter
from tui.screens.dialogs import ChoiceDialog
from tui.screens.keymap import RUNS_KEYS, Ability, Key
from tui.screens.monitor_runs import RunMarks
from tui.screens.phrases import note, own_runs_problem
from tui.screens.pollers.run_lists import ForeignRunListPoller, RowsPoller
from tui.screens.run_keys import CHANGES, RunKeysScreen
from tui.screens.services import AppServices
from tui.screens.tables import styled, wrap_text
from tui.screens.tables.runs import (
    DEFAULT_COLUMNS,
    NUM_FIRST_COLUMNS,
    SORT_SIGNS,
    field_columns,
    fit_run_list,
    run_list_line,
)
from tui.screens.widgets.lines import KeyedRow, LazyRows, Lines, escape_markup
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import ACCENT, MUTED

FILTER_HINT = "failed optim.name=adamw val_accuracy>0.9 -tag=old; enter keeps it, esc clears it"
FOREIGN_FILTER_HINT = "lr>0.1 state=growing loss<0.5 adamw; enter keeps it, esc clears it"
ONE_RUN_ACTIONS = ("open", "compare", "select")
# Title, frame, header, filter and footer.
OTHER_LINES = 6
# More rows are filtered and sorted in a thread: 2,000 take 5 ms.
MAX_INLINE_ROWS = 2000


class RunsScreen(RunKeysScreen):
    """A table of runs that can be marked, filtered, sorted, compared and opened; those of gputrain also labelled,
    stopped, resumed and deleted."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = RUNS_KEYS

    def __init__(self, app: AppServices, watched: Sequence[Path] = ()) -> None:
        """Show the runs of other programs below the paths `watched`, by default those in the runs folder."""
        super().__init__(app, Ability.WATCH if watched else Ability.ALL)
        self._found = (
            self.follow(ForeignRunListPoller(watched, app.intervals.poll_s, app.column_choice)) if watched else None
        )
        self._place = printable(", ".join(map(str, watched)))
        self.row_poller: RowsPoller = self._found or app.run_list_poller
        self.shows_runs = self._found is None
        self._default_order = "started_at" if self._found is None else "age"
        self._marks = RunMarks({} if watched else app.marked_runs)
        self._opened: frozenset[str] = frozenset()
        self._archived = self._has_rows = self._has_opened_only_run = False
        self._query, self._query_text, self._problem = parse_query(""), "", ""
        self._requested: ViewRequest | None = None
        self._view = RunView(ViewRequest(()))
        self._table: tuple[tuple[object, ...], FittedTable[RunRow]] | None = None
        self._fields: list[Field] = []
        self._names = NamesFinder(is_foreign=bool(watched))
        self._order: SortOrder | None = None
        self._drawn_order: SortOrder | None = None
        self._followed: tuple[object, Sequence[str]] = (None, ())

    def compose_body(self) -> ComposeResult:
        yield Lines(selectable=True, id="all-runs", title="Runs")
        yield TextLine(id="about-run")

    def make_filter(self) -> Filter:
        return Filter(placeholder=FILTER_HINT if self._found is None else FOREIGN_FILTER_HINT)

    def on_mount(self) -> None:
        self.run_worker(self._load_fields, thread=True)

    # What the list shows

    @property
    def _lines(self) -> Lines:
        return self.query_one("#all-runs", Lines)

    def _heading(self) -> str:
        found = self._found
        if found is None:
            return f"runs in {self.gputrain_app.runs_dir}{self._elsewhere}"
        left_out = f", without {pluralize(len(found.own), 'run')} of gputrain" if found.own else ""
        limited = ", not all of them" if found.is_partial else ""
        limited += f", {pluralize(len(found.unread), 'file')} not understood" if found.unread else ""
        return f"runs below {self._place}{left_out}{limited}"

    @property
    def _elsewhere(self) -> str:
        """Where runs of other hosts are listed, as a clause."""
        names = [reading.name for reading in self.gputrain_app.host_readings() if reading.rows]
        return f"; those of {list_names(names)} are on the monitor" if names else ""

    def _no_runs_text(self) -> str:
        if self._found is None:
            return f"No runs here yet{self._elsewhere}; press n to start one"
        if self._found.own:
            return printable(str(own_runs_problem(self._found.own, "gputrain-tui")))
        if self._found.unread:
            return self._found.unread[0]
        return f"No run below {self._place} yet; it appears here when a trainer writes one"

    def _default_columns(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        if self._found is not None:
            return tuple(self._found.columns)
        rows = self.row_poller.rows or ()
        if rows and all(row.record.command for row in rows):
            return run_columns(rows)
        first, rest = DEFAULT_COLUMNS[:NUM_FIRST_COLUMNS], DEFAULT_COLUMNS[NUM_FIRST_COLUMNS:]
        return tuple(dict.fromkeys((*first, *commands_metrics(rows), *rest)))

    # Content

    @property
    def has_content(self) -> bool:
        return self._has_rows

    def update_content(self) -> None:
        found = self._found
        if found is not None:
            self._follow_found(found)
        self._request_view()
        self._draw()
        self.show_title(self._heading())
        if found is not None and found.has_searched and not self._has_opened_only_run:
            self._has_opened_only_run = True
            if found.own:
                self.gputrain_app.show_toast(own_runs_problem(found.own, "gputrain-tui"))
            if found.rows is not None and len(found.rows) == 1 and self.app.screen is self:
                self._open_row(found.rows[0])

    def _follow_found(self, found: ForeignRunListPoller) -> None:
        """Have the runs on the page read first, and follow the names and the columns of the runs."""
        top = round(self._lines.scroll_y)
        found.visible = tuple(self._view.keys[top : top + self._lines.size.height])
        followed = self._names.find(found.rows or ()), found.columns
        if self._followed != followed:
            self._followed = followed
            # Without the config schema it takes no time.
            self._resolve_fields(NO_METRICS)

    def _load_fields(self) -> None:
        """Resolve the columns, in a thread: the config schema takes 0.3 s to import."""
        directions = NO_METRICS
        if self._found is None:
            # So that the first line needs no import.
            default_values()
            directions = read_directions(self.gputrain_app.runs_dir)
        self._resolve_fields(directions)
        self.app.call_from_thread(self.update_if_on_top)

    def _resolve_fields(self, directions: Mapping[str, Better]) -> None:
        """Find out what the names of the columns and of the order mean. `directions` are those of own metrics."""
        self._names.directions = directions
        self._fields = self._known(self._default_columns(), directions)
        known = self._known([order.field.name], directions) if (order := self.gputrain_app.list_order) else []
        self._order = SortOrder(known[0], order.reverse) if known and order is not None else None

    def _known(self, names: Sequence[str], directions: Mapping[str, Better]) -> list[Field]:
        known = self._names.find(self.row_poller.rows or ())
        return known_columns(names, replace(known, metrics=(*directions.items(), *known.metrics)))

    def _request_view(self) -> None:
        """Filter and sort the rows if anything has changed. What is shown stays while the filter has a mistake."""
        text = self.query_one(Filter).value.strip()
        rows = self.row_poller.rows or []
        names = self._names.find(rows)
        query = query_of(text, names)
        self._problem = query if isinstance(query, str) else ""
        if isinstance(query, Query):
            self._query, self._query_text = query, text
        minute = int(time.time() / 60) if "age" in self._query.fields else 0
        request = ViewRequest(rows, self._query_text, self._order, self._archived, minute, self._opened, names)
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
        """Show the rows, and what is to be known of the selected one."""
        self._show_rows()
        self._show_selected()

    def _show_rows(self) -> None:
        """Draw the rows of the list. Only the text of those that are visible is made."""
        lines, view, poller = self._lines, self._view, self.row_poller
        table = self._fit_table(lines.text_width)

        def line(index: int) -> Text:
            return styled(run_list_line(table, view.shown[index]))

        lines.set_rows(LazyRows(view.keys, line), [styled(table.header(MUTED))], Text(self._empty_text(), MUTED))
        # Of a list that is being read, keys need a page.
        is_read = poller.rows is not None and (poller.complete or len(poller.rows) >= lines.size.height)
        self._has_rows = self._has_rows or (is_read and view.request is self._requested)
        if view.request.order is not self._drawn_order:
            self._drawn_order = view.request.order
            lines.scroll_to_cursor()

    def _fit_table(self, width: int) -> FittedTable[RunRow]:
        """Return the table of all rows, so that it stays the same while a filter is typed."""
        request, fields = self._view.request, self._fields
        key = (request.rows, width, fields, request.order)
        if self._table is None or not all(map(is_, self._table[0], key)):
            table = fit_run_list(
                request.rows, width, fields, request.order,
                is_marked=lambda row: self._marks.contain(self._view.runs_of(row)),
                is_opened=lambda row: row.name in self._opened,
            )  # fmt: skip
            self._table = key, table
        return self._table[1]

    def _empty_text(self) -> str:
        poller = self.row_poller
        if (problem := poller.problem) is not None:
            return printable(str(problem))
        if poller.rows is None:
            return "Loading …"
        if self._view.request.query:
            return f"No run matches '{printable(self._view.request.query)}'; press esc to show all runs"
        if self._view.hidden:
            return f"All {pluralize(self._view.hidden, 'run')} are archived; press H to show them"
        return self._no_runs_text()

    def _show_selected(self) -> None:
        """Show what must be known of the selected run and its command, in the frame of a full list."""
        row, lines = self.selected_run(), self._lines
        parts = () if row is None else (note(row), printable(row.record.command))
        text = "   ".join(filter(None, parts))
        about = wrap_text(Text(text, MUTED), self.size.width - 2) if text else []
        has_room = len(self._view.keys) + len(about) <= self.size.height - OTHER_LINES
        lines.set_titles(self._title(), "" if has_room else escape_markup(shorten(text, max(lines.text_width - 4, 0))))
        self.query_one("#about-run", TextLine).show_lines(about if has_room else [])

    def _title(self) -> str:
        """Return the mistake in the filter, else how many runs there are, as markup."""
        if self._problem:
            return f"[$warning]{escape_markup(printable(self._problem))}[/]"
        poller = self.row_poller
        if poller.rows is None:
            return "Runs"
        if not poller.complete and poller.problem is None:
            return poller.reading_text
        marked = len(self._marked_rows())
        return escape_markup(self._view.count_text) + (f", [$accent]{marked} selected[/]" if marked else "")

    def on_lines_moved(self, event: Lines.Moved) -> None:
        if self._found is not None:
            self._follow_found(self._found)
        self._show_selected()
        self.update_keys()

    # Runs that a key is about

    def selected_run(self) -> RunRow | None:
        index = self._lines.selected_index
        return self._view.shown[index] if index is not None and index < len(self._view.shown) else None

    def _marked_rows(self) -> list[RunRow]:
        """Return the rows of the marked runs that exist."""
        return self._marks.rows(self.row_poller.rows or ())

    def target_runs(self) -> list[RunRow]:
        """Return the marked runs, else the selected one."""
        row = self.selected_run()
        return self._marked_rows() or (self._view.runs_of(row) if row is not None else [])

    # Keys

    def is_available(self, action: str) -> bool:
        if action in ONE_RUN_ACTIONS:
            return self.selected_run() is not None
        return action not in CHANGES or self.can_change(action)

    def title_of(self, key: Key) -> str:
        is_hiding = key.action == "archived" and self._archived
        return "hide archived" if is_hiding else super().title_of(key)

    def action_open(self) -> None:
        if (row := self.selected_run()) is not None:
            self._open_row(row)

    def _open_row(self, row: RunRow) -> None:
        """Open the run, or show or hide the trials of the sweep."""
        if self._found is not None:
            if (run := self._found.find_run(row.folder)) is not None:
                self.gputrain_app.open_foreign_run(run)
        elif row.trials:
            self._opened ^= {row.name}
            self.update_content()
        else:
            self.gputrain_app.open_run(row.folder)

    def action_select(self) -> None:
        if (row := self.selected_run()) is None:
            return
        self._marks.toggle(self._view.runs_of(row))
        self._show_rows()
        self._lines.action_move(1)
        self._show_selected()

    def action_select_all(self) -> None:
        self._marks.toggle(self._view.matching)
        self._draw()

    def action_compare(self) -> None:
        """Compare the selected runs; a single one with that under the cursor."""
        marked, row = self._marked_rows(), self.selected_run()
        under_cursor = self._view.runs_of(row) if row is not None and len(marked) == 1 else []
        keys = dict.fromkeys(row.folder for row in (*marked, *under_cursor))
        found = [Path(key) if self._found is None else self._found.find_run(key) for key in keys]
        runs = [run for run in found if run is not None]
        if len(runs) < 2:
            self.gputrain_app.show_toast("Select two runs or more with space to compare them")
        else:
            self.gputrain_app.open_compare(runs)

    def action_sort(self) -> None:
        """Choose the column to sort by; the same one again turns the order around."""
        if not self._fields:
            # The thread that loads them waits for a slow disk.
            self._resolve_fields(NO_METRICS)
        order = self._order or SortOrder(self._known([self._default_order], NO_METRICS)[0])
        # The results are what people sort by, and the other columns are a few keys away.
        selected = order.field.name if self._order is not None else "best"
        fields = {
            field.name: field for field in (*self._known([self._default_order, "name"], NO_METRICS), *self._fields)
        }

        def sort_by(name: str | None) -> None:
            if name is not None:
                reverse = self._order is not None and name == order.field.name and not order.reverse
                self.gputrain_app.list_order = SortOrder(fields[name], reverse)
                self.run_worker(self._load_fields, thread=True)

        rows = []
        for column in field_columns(fields.values(), self._view.request.rows):
            sign = f" {SORT_SIGNS[order.descending]}" if column.key == order.field.name else ""
            rows.append(KeyedRow(column.key, Text.assemble(printable(column.title), (sign, ACCENT))))
        self.app.push_screen(ChoiceDialog("Sort by", rows, selected=selected), sort_by)

    def action_archived(self) -> None:
        self._archived = not self._archived
        self.update_content()

    def action_sweep(self) -> None:
        row = self.selected_run()
        self.gputrain_app.open_sweep(row.name if row is not None else "")
