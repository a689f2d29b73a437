"""Modal dialogs: choose one row, choose several rows, enter text, read text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.cells import cell_len
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from engine.base.colors import without_colors
from engine.base.errors import UsageError
from engine.base.files import read_bytes
from engine.base.text import printable
from engine.report.readings import GpuReading
from engine.report.table import GAP, NO_LIMIT, Column, fit
from tui.form.flags import WAITING_KEYS
from tui.screens.base import Dialog, Result
from tui.screens.keymap import Key
from tui.screens.phrases import holders_text
from tui.screens.services import AppServices
from tui.screens.tables import styled, wrap_text
from tui.screens.tables.log_lines import fit_bar, output_line
from tui.screens.widgets.entry import TextEntry
from tui.screens.widgets.lines import KeyedRow, Lines
from tui.terminal.palette import ACCENT, BAD, MUTED, STRONG

# Of a dialog with a text: frame, empty line and hint.
FRAME_ROWS = 4


class RowsDialog(Dialog[Result]):
    """Shows rows to choose from, below a note if there is one."""

    def __init__(
        self, title: str, rows: Sequence[KeyedRow], note: str = "", selected: str = "", header: Sequence[Text] = ()
    ) -> None:
        """`selected` is the key of the row under the cursor."""
        super().__init__(title)
        self._rows, self._note, self._selected_key, self._header = list(rows), note, selected, header

    def compose_box(self) -> ComposeResult:
        if self._note:
            yield Static(self._note, classes="note", markup=False)
        yield Lines(selectable=True)

    def on_mount(self) -> None:
        lines = self.query_one(Lines)
        lines.styles.height = min(len(self._rows), 16) + len(self._header)
        self.update_rows()
        lines.select_key(self._selected_key)
        lines.focus()

    def update_rows(self) -> None:
        """Show the rows."""
        self.query_one(Lines).set_rows(self._rows)


class ChoiceDialog(RowsDialog[str]):
    """Choose one of several rows. Returns the row's key, or None if canceled."""

    # Some questions are whether to cancel a run.
    HINT = "enter choose   esc close"

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.dismiss(event.key)


def confirm(app: App[Any], question: str, no: str, yes: str, then: Callable[[], object], about: str = "") -> None:
    """Ask a question, and call `then` if the answer is `yes`; `no` is first, so that a stray enter changes nothing.

    What follows the question is wrapped below it, because a title is cut.
    """
    title, mark, consequence = question.partition("? ")
    note = "\n".join(filter(None, [consequence, about]))

    def answer(key: str | None) -> None:
        if key == "yes":
            then()

    rows = [KeyedRow("no", Text(no)), KeyedRow("yes", Text(yes))]
    app.push_screen(ChoiceDialog(title + mark.strip(), rows, note), answer)


def ask_to_share_gpus(app: AppServices, config: Mapping[str, Any], start: Callable[[], object]) -> None:
    """Call `start`, after a question if a run with these config values, by key, would use GPUs that are not free."""
    from engine.gpus.reservation_reader import read_reservations
    from engine.gpus.selection import cuda_devices, select, why_not_free

    snapshot, in_use, names = app.gpu_poller.snapshot, "", list[str]()
    if snapshot is not None and app.demo_notice is None and not config.keys() & WAITING_KEYS:
        # The run says what is wrong with its selection.
        with suppress(UsageError):
            devices = cuda_devices(snapshot, read_reservations())
            selected = select(str(config.get("device.gpus", "auto")), devices)
            in_use, taken = why_not_free(selected), {device.index for device in selected if not device.is_free}
            names = [holders_text(gpu) for gpu in snapshot.gpus if gpu.index in taken]
    if not in_use:
        start()
        return
    one, about = len(names) == 1, printable(in_use)
    question = f"{names[0]}: start there?" if one else f"{len(names)} GPUs are not free: start there?"
    about = about if one else "\n".join([*names, about])
    confirm(app, question, "Do not start", "Start, and share it" if one else "Start, and share them", start, about)


class MultiChoiceDialog(RowsDialog[list[str]]):
    """Choose any number of rows, below a `header`. Returns their keys, or None if canceled."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("space", "select", show=False)]
    BOX_CLASSES = "dialog wide"
    HINT = "space select   enter confirm   esc cancel"

    def __init__(self, title: str, rows: Sequence[KeyedRow], selected: Sequence[str], header: Sequence[Text] = ()):
        super().__init__(title, rows, header=header)
        self._selected = set(selected)

    def update_rows(self) -> None:
        marks = {True: Text("[x] ", STRONG), False: Text("[ ] ")}
        self.query_one(Lines).set_rows(
            [KeyedRow(row.key, marks[row.key in self._selected] + row.text) for row in self._rows],
            [Text("    ") + line for line in self._header],
        )

    def action_select(self) -> None:
        if (key := self.query_one(Lines).selected_key) is not None:
            self._selected ^= {key}
            self.update_rows()

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.dismiss([row.key for row in self._rows if row.key in self._selected])


class TextInputDialog(Dialog[str]):
    """Enter a line of text. Returns it stripped, or None if canceled.

    `check` raises UsageError if a text is refused; the dialog stays open and says why.
    """

    HINT = "enter confirm   esc cancel"

    def __init__(self, title: str, value: str, note: str, check: Callable[[str], object]) -> None:
        super().__init__(title)
        self._value, self._note, self._check = value, note, check

    def compose_box(self) -> ComposeResult:
        yield Static(self._note, classes="note", markup=False)
        yield TextEntry(self._value)
        yield Static("", classes="problem", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        value = event.value.strip()
        try:
            if value:
                self._check(value)
        except UsageError as error:
            self.query_one(".problem", Static).update(str(error))
        else:
            self.dismiss(value)


class TextDialog(Dialog[None]):
    """Read lines of text, wrapped to the dialog's width, and copy them, or `copied_text` instead."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "leave", show=False),
        Binding("ctrl+y", "copy", show=False),
    ]
    HINT = "j k g G scroll  drag, ^y copy  esc close"
    BOX_CLASSES = "dialog wide"

    def __init__(self, title: str, lines: Sequence[Text], copied_text: str = "") -> None:
        super().__init__(title)
        self.show(lines, copied_text)

    def show(self, lines: Sequence[Text], copied_text: str = "") -> None:
        """Replace the text."""
        self._lines = list(lines)
        self._copied_text = copied_text or "\n".join(line.plain for line in self._lines)
        if self.is_mounted:
            self._update_lines()

    def compose_box(self) -> ComposeResult:
        yield Lines()

    def on_mount(self) -> None:
        self.query_one(Lines).focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self._update_lines)

    def _update_lines(self) -> None:
        lines = self.query_one(Lines)
        wrapped = self._wrapped(lines.text_width)
        lines.styles.height = min(len(wrapped), max(self.size.height * 9 // 10 - FRAME_ROWS, 1))
        lines.set_texts(wrapped)

    def _wrapped(self, width: int) -> list[Text]:
        return [part for line in self._lines for part in wrap_text(line, width)]

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(self._copied_text)


def read_config_lines(path: Path) -> tuple[list[Text], str]:
    """Return the stored config of a run, whose keys that differ from their defaults are marked, or why it cannot be
    read; and its text. Imports the config schema, which takes a fifth of a second."""
    from engine.config.yaml_io import MAX_CONFIG_BYTES
    from tui.screens.tables.config import config_lines

    try:
        text = read_bytes(path, MAX_CONFIG_BYTES).decode(errors="replace")
    except OSError as error:
        return [Text(f"The config cannot be read: {error.strerror}", BAD)], ""
    return config_lines(text), text


class HelpDialog(TextDialog):
    """The keys of a screen by group, with what they do, and the meanings of the readings that it shows.

    Keys that have no effect at the moment are muted.
    """

    FITS_ANY_SIZE = True

    def __init__(
        self,
        groups: Mapping[str, Sequence[Key]],
        is_available: Callable[[str], bool],
        readings: Sequence[GpuReading] = (),
    ) -> None:
        self._groups, self._is_available, self._readings = groups, is_available, readings
        super().__init__("Keys", [])

    def _wrapped(self, width: int) -> list[Text]:
        lines = help_lines(self._groups, self._is_available, width)
        return [*lines, Text(""), *meaning_lines(self._readings, width)] if self._readings else lines


def problem_lines(problems: Sequence[tuple[str, str]]) -> list[Text]:
    """Format (location, message) pairs; the message follows its location on an indented line."""
    lines: list[Text] = []
    for location, message in problems:
        lines += [Text(location, BAD), Text(f"  {message}")] if location else [Text(message)]
    return lines


POLL_INTERVAL_SECONDS = 0.5


class LogDialog(TextDialog):
    """Shows the lines that `read` returns, from the end. New lines appear while the end is in view."""

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


MIN_HELP_COLUMNS = 20
# In less, the help of a key says what its title does.
TITLE_MIN_WIDTH = 60
Row = TypeVar("Row")
READING_COLUMNS: tuple[Column[GpuReading], ...] = (
    Column("label", "", lambda reading: reading.label),
    Column("unit", "", lambda reading: reading.unit),
    Column("meaning", "", lambda reading: reading.meaning),
)


def help_lines(groups: Mapping[str, Sequence[Key]], is_available: Callable[[str], bool], width: int) -> list[Text]:
    """Return a heading per group, and per key its names, title and help, wrapped to `width` columns."""
    columns: list[Column[Key]] = [
        Column("keys", "", lambda row: row.key_labels, style=lambda row: ACCENT if is_available(row.action) else MUTED),
        Column("title", "", lambda row: row.title, style=lambda row: "" if is_available(row.action) else MUTED),
        Column("help", "", lambda row: row.help),
    ]
    if width < TITLE_MIN_WIDTH:
        del columns[1]
    return _wrapped_table(groups, columns, lambda key: key.help, width)


def meaning_lines(readings: Sequence[GpuReading], width: int) -> list[Text]:
    """Return a heading, and the label, the unit and the meaning of each reading, wrapped to `width` columns."""
    return _wrapped_table({"Readings": readings}, READING_COLUMNS, lambda reading: reading.meaning, width)


def _wrapped_table(
    groups: Mapping[str, Sequence[Row]], columns: Sequence[Column[Row]], last: Callable[[Row], str], width: int
) -> list[Text]:
    """Return a table with a heading per group, whose last column is wrapped to what `width` leaves."""
    table = fit(columns, [row for group in groups.values() for row in group], NO_LIMIT)
    indent, lines = sum(table.widths[:-1]) + (len(columns) - 1) * len(GAP), list[Text]()
    for title, group in groups.items():
        lines += [Text(""), Text(title, STRONG)] if lines else [Text(title, STRONG)]
        for row in group:
            first, *others = wrap_text(Text(last(row)), max(width - indent, MIN_HELP_COLUMNS))
            lines.append(styled(table.line(row, rest=(columns[-1].key, ((first.plain, MUTED),)))))
            lines += [Text(" " * indent + other.plain, MUTED) for other in others]
    return lines
