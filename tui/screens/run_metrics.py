"""What was found in the output of a run, and the names that the user gives to its metrics.

The names are kept for the folder of the run (`engine.runs.metric_rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from rich.text import Text

from engine.base.codec import replace
from engine.base.errors import UsageError
from engine.base.text import printable
from engine.jobs.command.try_parse import TriedFile, try_parse
from engine.runs.curves import Curves
from engine.runs.metric_rules import MAX_NAMES, FolderRules, read_rules, write_rules
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import ChoiceDialog, TextInputDialog
from tui.screens.tables.tried_formats import format_lines
from tui.screens.widgets.lines import KeyedRow
from tui.terminal.palette import MUTED

READ_BYTES = 1 << 20  # of a log: a fifth of a second


class MetricsDialog(ChoiceDialog):
    """Shows the metrics, which can be changed, and the formats of the output, which cannot."""

    HINT = "enter rename, hide or plot over it   esc close"
    BOX_CLASSES = "dialog wide"


class RunMetrics:
    """Shows the metrics of a run, and changes what they are called."""

    def __init__(self, screen: GputrainScreen, folder: Path, curves: Curves, changed: Callable[[], None]) -> None:
        """`curves` have the names that the metrics have now."""
        self._screen, self._curves, self._changed = screen, curves, changed
        self._rules = read_rules(folder)
        self._names = dict(self._rules.names)

    def open(self, log: Path | None, patterns: Collection[str]) -> None:
        """Read the beginning of the log in a thread, and show what was found."""
        self._screen.act(partial(_formats, log, patterns), self._show, in_thread=True)

    def _show(self, formats: list[str]) -> None:
        originals = {new: name for name, new in self._names.items() if new}
        metrics = [originals.get(name, name) for name in self._curves.names]
        absent = [name for name, new in self._names.items() if not new] + [self._rules.x] * bool(self._rules.x)
        metrics += [name for name in absent if name not in metrics]
        rows = [KeyedRow(f"={name}", self._row(name)) for name in metrics]
        texts = ["", "Formats in the output", *formats] if formats else []
        rows += [KeyedRow(str(number), Text(text, MUTED)) for number, text in enumerate(texts)]
        title = "Metrics, named for all runs in this folder"
        self._screen.app.push_screen(MetricsDialog(title, rows), self._choose)

    def _row(self, name: str) -> Text:
        new = self._names.get(name, name)
        note = "  hidden" if not new else f"  was {name}" if new != name else ""
        text = Text(printable(new or name)).append(printable(note), MUTED)
        return text.append("  x axis", MUTED) if name == self._rules.x else text

    def _choose(self, key: str | None) -> None:
        if key is None or not key.startswith("="):
            return
        name = key[1:]
        is_hidden, is_x = self._names.get(name) == "", name == self._rules.x
        rows = [
            KeyedRow("rename", Text("Rename")),
            KeyedRow("hide", Text("Show" if is_hidden else "Hide")),
        ]
        if is_x or self._is_whole(name):
            rows.append(KeyedRow("x", Text("Plot the others over steps again" if is_x else "Plot the others over it")))
        self._screen.app.push_screen(ChoiceDialog(printable(name), rows), partial(self._change, name))

    def _is_whole(self, name: str) -> bool:
        """Whether a metric may be a position, which is a whole number, as far as its extremes tell."""
        figures = self._curves.extremes(self._names.get(name) or name)
        return all(value is not None and value.is_integer() for value in (figures.low, figures.high, figures.last))

    def _change(self, name: str, what: str | None) -> None:
        if what == "rename":
            note = "The name in charts and reports; empty for that of the output:"
            dialog = TextInputDialog(printable(name), self._names.get(name) or name, note, self._check)
            self._screen.app.push_screen(dialog, lambda new: None if new is None else self._rename(name, new or name))
        elif what == "hide":
            self._rename(name, name if self._names.get(name) == "" else "")
        elif what == "x":
            self._save(replace(self._rules, x="" if name == self._rules.x else name))

    def _check(self, new: str) -> None:
        """Two metrics of one name would be one curve. Raises UsageError."""
        if new in self._curves.names:
            raise UsageError.one("", f"{printable(new)} is the name of another metric", code="name-in-use")

    def _rename(self, name: str, new: str) -> None:
        names = {old: each for old, each in self._names.items() if old != name}
        names |= {name: new} if new != name else {}
        self._save(replace(self._rules, names=tuple(names.items())[-MAX_NAMES:]))

    def _save(self, rules: FolderRules) -> None:
        def save() -> None:
            try:
                write_rules(rules)
            except OSError as error:
                reason = f"The names cannot be remembered: {error.strerror}"
                raise UsageError.one("", reason, code="not-writable") from error

        self._screen.act(save, lambda _: self._changed())


def _formats(log: Path | None, patterns: Collection[str]) -> list[str]:
    """Return what was found in a log; nothing without one. Raises UsageError."""
    tried = TriedFile() if log is None or not log.is_file() else try_parse(log, tuple(patterns), READ_BYTES)
    return list(format_lines(tried))
