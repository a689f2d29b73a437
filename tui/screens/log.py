"""The log of a run in a dialog that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding, BindingType

from engine.utils.colors import without_colors
from engine.utils.text import printable
from tui.palette import MUTED
from tui.screens.dialogs import TextDialog
from tui.tables import wrap_text
from tui.tables.log_lines import fit_bar, output_line
from tui.widgets.lines import Lines

POLL_INTERVAL_SECONDS = 0.5


class LogDialog(TextDialog):
    """Shows the lines that `read` returns, from the end. New lines appear while the end is in view."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("l", "leave", show=False)]
    BOX_CLASSES = "dialog full"

    def __init__(self, name: str, read: Callable[[], Sequence[str]]) -> None:
        super().__init__(f"Log of {printable(name)}", [])
        self._read = read
        self._log: tuple[str, ...] = ()
        self._known: dict[str, list[Text]] = {}
        self._known_width = 0

    def on_mount(self) -> None:
        self.set_interval(POLL_INTERVAL_SECONDS, self._follow)
        self.call_after_refresh(self._follow)

    def _follow(self) -> None:
        """Show the lines that the log has at the moment, unless the user has scrolled up."""
        lines, log = self.query_one(Lines), tuple(self._read())
        if log != self._log and lines.scroll_offset.y >= lines.max_scroll_y:
            self._log = log
            self.show([], "\n".join(map(without_colors, log)))
            # The end is known after the layout.
            self.call_after_refresh(lines.scroll_end, animate=False, immediate=True, force=True)

    def _update_lines(self) -> None:
        lines = self.query_one(Lines)
        lines.set_texts(self._wrapped(lines.text_width) or [Text("The log is empty", MUTED)])

    def _wrapped(self, width: int) -> list[Text]:
        """Wrap the lines. Those that were there before are wrapped already."""
        known = self._known if width == self._known_width else {}
        self._known = {line: known.get(line) or _wrap(line, width) for line in dict.fromkeys(self._log)}
        self._known_width = width
        return [part for line in self._log for part in self._known[line]]


def _wrap(line: str, width: int) -> list[Text]:
    text = fit_bar(output_line(line), width)
    return [text] if cell_len(text.plain) <= width else wrap_text(text, width)
