"""The log of a run in a dialog that follows it and searches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Input

from engine.utils.colors import without_colors
from engine.utils.text import pluralize, printable
from tui.palette import ACCENT, CURSOR, MUTED
from tui.screens.base import Dialog, Filter
from tui.tables import wrap_text
from tui.tables.log_lines import fit_bar, output_line
from tui.widgets.lines import Lines, escape_markup
from tui.widgets.text_line import TextLine

POLL_INTERVAL_SECONDS = 0.5


class LogDialog(Dialog[None]):
    """Shows the lines that `read` returns, from the end. While the end is in view, new lines scroll into it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", show=False),
        Binding("q,l", "leave", show=False),
        Binding("slash", "search", show=False),
        Binding("n", "match(1)", show=False),
        Binding("N", "match(-1)", show=False),
        Binding("ctrl+y", "copy", show=False),
    ]

    def __init__(self, name: str, read: Callable[[], Sequence[str]]) -> None:
        super().__init__("")
        self._run_name, self._read = name, read
        self._log: tuple[str, ...] = ()
        self._wrapped: dict[str, list[Text]] = {}
        self._wrap_key: tuple[int, str] = (0, "")
        self._matches: list[int] = []
        """Numbers of the shown lines that contain the searched text, the first of a wrapped line."""
        self._match = -1
        self._drawn: object = None
        self._frame_title = ""
        self._follows = True
        self._scrolls_soon = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog full"):
            yield Lines(id="log-lines", empty_text=Text("The log is empty", MUTED))
            yield Filter("log-search", "Search; enter keeps it, esc clears it")
            yield TextLine(id="log-keys", classes="hint")

    def on_mount(self) -> None:
        self.query_one("#log-lines").focus()
        self.set_interval(POLL_INTERVAL_SECONDS, self._update)
        self.call_after_refresh(self._update)

    def on_resize(self) -> None:
        self.call_after_refresh(self._update)

    @property
    def _query(self) -> str:
        return self.query_one("#log-search", Input).value.lower()

    def _update(self, *, can_follow: bool = True) -> None:
        """Show the lines that the log has at the moment. Stay at the end if that is in view and `can_follow`."""
        lines = self.query_one("#log-lines", Lines)
        log, key = tuple(self._read()), (lines.text_width, self._query)
        if (log, key, self._match) != self._drawn:
            top = lines.scroll_offset.y
            self._follows = can_follow and (self._scrolls_soon or top >= lines.max_scroll_y)
            if key != self._wrap_key:
                self._wrap_key, self._wrapped = key, {}
            dropped = self._dropped_lines(log)
            texts = self._wrap(log)
            if 0 <= self._match < len(self._matches):
                current = self._matches[self._match]
                texts[current] = texts[current].copy()
                texts[current].stylize(CURSOR)
            self._drawn = (log, key, self._match)
            lines.set_texts(texts)
            if self._follows:
                # The end is known after the layout.
                self._scrolls_soon = True
                self.call_after_refresh(self._scroll_to_end)
            elif dropped:
                lines.scroll_to(y=max(top - dropped, 0), animate=False, immediate=True, force=True)
        self._show_state()

    def _scroll_to_end(self) -> None:
        self._scrolls_soon = False
        if self._follows:
            self.query_one("#log-lines", Lines).scroll_end(animate=False, immediate=True, force=True)
            self._show_state()

    def _dropped_lines(self, log: tuple[str, ...]) -> int:
        """Return how many shown lines a long log has lost at its beginning, and keep the new log."""
        old, self._log = self._log, log
        if not old or not log or old[0] == log[0] or log[0] not in old:
            return 0
        return sum(len(self._wrapped.get(line, ())) for line in old[: old.index(log[0])])

    def _wrap(self, log: Sequence[str]) -> list[Text]:
        """Wrap the lines with the matches highlighted, and remember where these are."""
        width, query = self._wrap_key
        shown: list[Text] = []
        self._matches = []
        for line in log:
            if line not in self._wrapped:
                text = fit_bar(output_line(line), width)
                if query:
                    text.highlight_words([query], ACCENT, case_sensitive=False)
                fits = cell_len(text.plain) <= width
                self._wrapped[line] = [text] if fits else wrap_text(text, width)
            if query and query in without_colors(line).lower():
                self._matches.append(len(shown))
            shown += self._wrapped[line]
        # Without the lines that the log has lost, or a log that is open for days would fill the memory.
        self._wrapped = {line: self._wrapped[line] for line in log}
        self._match = min(self._match, len(self._matches) - 1)
        return shown

    def _show_state(self) -> None:
        lines = self.query_one("#log-lines", Lines)
        below = round(lines.max_scroll_y - lines.scroll_offset.y)
        place = "following" if below <= 0 else f"{pluralize(below, 'line')} below"
        title = escape_markup(f"Log of {printable(self._run_name)}: {place}")
        if title != self._frame_title:
            self._frame_title = title
            self.query_one(".dialog").border_title = title
        found = ""
        if self._query:
            found = f"match {self._match + 1} of {len(self._matches)}   " if self._matches else "no match   "
        keys = Text.assemble((found, ACCENT), ("/ search   n N next, previous   ^y copy   esc close", MUTED))
        self.query_one("#log-keys", TextLine).show(keys)

    @on(Input.Changed, "#log-search")
    def _search(self) -> None:
        """Select the last match, because the log opens at its end."""
        self._match = -1
        self._update(can_follow=False)
        self._select(len(self._matches) - 1)

    def _select(self, match: int) -> None:
        self._match = match
        self._update(can_follow=False)
        if match >= 0:
            lines = self.query_one("#log-lines", Lines)
            middle = max(self._matches[match] - lines.size.height // 2, 0)
            lines.scroll_to(y=middle, animate=False, immediate=True, force=True)
            self._show_state()

    def action_search(self) -> None:
        self.query_one(Filter).activate()

    def action_match(self, step: int) -> None:
        if self._matches:
            self._select((self._match + step) % len(self._matches))

    def action_copy(self) -> None:
        self.app.copy_to_clipboard("\n".join(map(without_colors, self._log)))

    def action_back(self) -> None:
        """End the search, else close the dialog."""
        search = self.query_one(Filter)
        if search.value:
            search.action_dismiss()
            self.query_one("#log-lines").focus()
        else:
            self.action_leave()
