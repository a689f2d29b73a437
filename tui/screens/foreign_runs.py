"""The list of runs that other programs record: the table of `tui.screens.run_table`, which changes nothing.

`tui.pollers.foreign_runs` finds and reads the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding

from engine.runs.columns import ColumnChoice, foreign_column_choices
from engine.runs.foreign_rows import FIRST_COLUMNS
from engine.runs.run_row import RunRow
from engine.runs.run_view import Parameters
from engine.utils.text import pluralize, printable
from tui.keymap import CHANGE_KEYS, FOREIGN_RUNS_KEYS, Key
from tui.list_settings import FOREIGN_SETTINGS_FILE
from tui.palette import MUTED
from tui.phrases import foreign_refusal, own_runs_problem
from tui.pollers.foreign_runs import ForeignRunListPoller, ListNames, Search
from tui.screens.base import AppServices, Filter
from tui.screens.run_table import RunTableScreen
from tui.tables.foreign_runs import preview_lines
from tui.widgets.lines import Lines, escape_markup

FILTER_HINT = "lr>0.1 state=growing loss<0.5 adamw; enter keeps it, esc clears it"


class ForeignRunsScreen(RunTableScreen):
    """A table of runs of other programs that can be marked, filtered, sorted, compared and opened."""

    SCREEN_KEYS: ClassVar[Sequence[Key]] = FOREIGN_RUNS_KEYS
    SETTINGS_FILE = FOREIGN_SETTINGS_FILE
    DEFAULT_ORDER = "age"

    def __init__(self, app: AppServices, search: Search, place: str) -> None:
        """`search` finds the runs, and `place` says where."""
        self._found = ForeignRunListPoller(search, app.intervals.poll_s)
        super().__init__(app, self._found, {})
        self._place = place
        self._names = ListNames()
        self._has_opened_only_run = False
        self.follow(self._found)
        for key in CHANGE_KEYS:
            self.add_binding(Binding(key.key, "refuse", key.title, show=False))

    @property
    def heading(self) -> str:
        own = self._found.own
        left_out = f", without {pluralize(len(own), 'run')} of gputrain" if own else ""
        limited = ", not all of them" if self._found.is_partial else ""
        return f"runs below {printable(self._place)}{left_out}{limited}"

    @property
    def parameters(self) -> Parameters:
        return self._names.parameters

    @property
    def default_columns(self) -> tuple[str, ...]:
        return self._names.columns or FIRST_COLUMNS

    @property
    def reading_text(self) -> str:
        if not self._found.has_searched:
            return f"{pluralize(self._found.count, 'run')} found …"
        return f"{self._found.num_read:,} of {self._found.count:,} runs read …"

    @property
    def no_runs_text(self) -> str:
        if self._found.own:
            return printable(str(own_runs_problem(self._found.own, "gputrain-tui")))
        return f"No run below {printable(self._place)} yet; it appears here when a trainer writes one"

    def make_filter(self) -> Filter:
        return Filter(placeholder=FILTER_HINT)

    def make_preview(self) -> Lines:
        return Lines(id="run-preview")

    def preview_run(self, row: RunRow | None) -> None:
        panel = self.query_one("#run-preview", Lines)
        panel.set_titles(escape_markup(printable(row.name)) if row is not None else "Preview")
        if row is None:
            panel.set_texts([Text("No run is selected", MUTED)])
        else:
            panel.set_texts(preview_lines(row, panel.text_width, panel.size.height))

    def find_choices(self, first: Sequence[str]) -> list[ColumnChoice]:
        return foreign_column_choices(self._view.request.rows, first)

    def update_content(self) -> None:
        if self._names is not self._found.names:
            self._names = self._found.names
            # Without the config schema it takes no time.
            self.resolve_fields()
        self._request_visible()
        super().update_content()
        if self._found.has_searched and not self._has_opened_only_run:
            if self._found.own:
                self.gputrain_app.show_toast(own_runs_problem(self._found.own, "gputrain-tui"))
            self._open_only_run()

    def _request_visible(self) -> None:
        """Have the runs on the page read first."""
        lines, keys = self.query_one("#all-runs", Lines), self._view.keys
        top = round(lines.scroll_y)
        self._found.visible = tuple(keys[top : top + lines.size.height])

    def _open_only_run(self) -> None:
        """Open the run if the first search has found only one."""
        self._has_opened_only_run = True
        rows = self._found.rows or ()
        if len(rows) == 1 and self.app.screen is self:
            self.open_row(rows[0])

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._request_visible()
        super().on_lines_moved(event)

    def is_available(self, action: str) -> bool:
        return self._selected_row() is not None or action not in ("open", "mark", "compare")

    # Commands

    def open_row(self, row: RunRow) -> None:
        if (run := self._found.find_run(row.folder)) is not None:
            self.gputrain_app.open_foreign_run(run)

    def action_compare(self) -> None:
        """Compare the marked runs."""
        found = [self._found.find_run(row.folder) for row in self._marked_rows()]
        runs = [run for run in found if run is not None]
        if len(runs) < 2:
            self.gputrain_app.show_toast("Mark two runs or more with space to compare them")
        else:
            self.gputrain_app.open_compare(runs)

    def action_refuse(self) -> None:
        """Say why nothing is changed."""
        row = self._selected_row()
        self.gputrain_app.show_toast(foreign_refusal("the run" if row is None else row.name))
