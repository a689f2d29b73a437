"""Tables in the output of a training: rows below a heading of names, and boxes with a name and a value per row.

`output_metrics` gives it the lines one after another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.foreign.line_metrics import MAX_LINE_LENGTH, ParsedLine
from engine.foreign.line_names import is_position, is_result
from engine.foreign.line_prefix import strip_prefix
from engine.foreign.reading import EPOCH_NAMES, parse_number, to_step

MIN_HEADING_COLUMNS = 3
MAX_BOX_ROWS = 200
_HEADING_NAME = re.compile(r"[A-Za-z#][\w@./%()#-]*+(?: [A-Za-z/(%][\w@./%()#-]*+){0,3}")
# What a progress bar adds to a row or a heading: `: 100%|███`
_TABLE_END = re.compile(r":\s{1,8}\d{1,3}%")
_UNDERLINE = re.compile(r"\s*[-=─━]{1,40}(?:\s+[-=─━]{1,40})+\s*")
_CELL = re.compile(
    r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)"
    r"(?P<rest>/\d+|\s?%|\s?\([\d.%]+\)|\s?[A-Za-zµ]{1,3}(?:/\w{1,5})?)?",
    re.IGNORECASE,
)
_WIDE = re.compile(r"\s{2,}|\t")
_LABEL = re.compile(r"[\w.]{1,40}: ")
_BARS = re.compile(r"[|│┃]")
_BOX_NAME = re.compile(r"[A-Za-z_][\w@./%()+ -]{0,100}")
_STEP_COLUMNS = (
    "total_timesteps", "global_step", "step", "steps", "num_updates", "iteration", "iterations", "iter", "it", "#",
    "batch",
)  # fmt: skip
_EPOCH_COLUMNS = frozenset({*EPOCH_NAMES, "e"})


@dataclass
class _Heading:
    names: list[str]
    by_commas: bool
    is_sure: bool
    """Whether the names are known to be those of columns: results are among them, or a line is drawn below."""


class Tables:
    """The table that the latest lines belong to."""

    def __init__(self) -> None:
        self._heading: _Heading | None = None

    def read(self, text: str) -> ParsedLine | None:
        """Return the values of a row; None if the line is no row of the latest heading."""
        if self._heading is None or len(text) > MAX_LINE_LENGTH:
            return None
        cells = _cells(text, self._heading)
        return _row(cells, self._heading.names) if cells else None

    def is_heading(self, text: str) -> bool:
        """Note the heading of a table, and the line below it."""
        if len(text) > MAX_LINE_LENGTH:
            return False
        if self._heading is not None and _UNDERLINE.fullmatch(text):
            self._heading.is_sure = True
            return True
        heading = _parse_heading(text)
        if heading is None:
            return False
        self._heading = heading
        return heading.is_sure


def _parse_heading(text: str) -> _Heading | None:
    """Return the names of the columns of a table; None for any other line."""
    text = _without_bar(text).strip()
    if not text or text[-1] in ".;!?" or (text[0].isdigit() and "," not in text):
        return None
    if "," in text and _WIDE.search(text) is None:
        names = [name.strip() for name in _LABEL.sub("", (strip_prefix(text) or "").strip(), count=1).split(",")]
        by_commas = True
    else:
        names = _WIDE.split(text)
        by_commas = False
    if len(names) < MIN_HEADING_COLUMNS or not all(_HEADING_NAME.fullmatch(name) for name in names):
        return None
    cleaned = [_column_name(name) for name in names]
    # A sentence has few names of results in it.
    is_sure = sum(map(is_result, cleaned)) * 6 >= len(cleaned)
    return _Heading(cleaned, by_commas, is_sure) if is_sure or not by_commas else None


def _column_name(name: str) -> str:
    words = re.sub(r"(?<=\w)\s?\([\w/% ]*\)$", "", name).strip("():").replace("(", "/").split()
    return words[0] if len(words) == 1 else "_".join(words).lower() or name


def _without_bar(text: str) -> str:
    end = _TABLE_END.search(text)
    return text[: end.start()] if end is not None else text


def _cells(text: str, heading: _Heading) -> list[str]:
    """Return the cells of a row with as many as the heading has."""
    text = _without_bar(text).strip()
    if heading.by_commas:
        stripped = _LABEL.sub("", (strip_prefix(text) or "").strip(), count=1)
        splits: list[list[str]] = [[cell.strip() for cell in stripped.split(",")]]
    else:
        splits = [_WIDE.split(text), text.split()]
    return next((cells for cells in splits if len(cells) == len(heading.names)), [])


def _row(cells: Sequence[str], names: Sequence[str]) -> ParsedLine | None:
    numbers = [_CELL.fullmatch(cell) for cell in cells]
    # The first cell of a summary of all classes names them.
    if (numbers[0] is None and cells[0] != "all") or sum(number is not None for number in numbers) * 2 < len(cells):
        return None
    line = ParsedLine(held_out=cells[0] == "all")
    found: dict[str, float] = {}
    for name, number in zip(names, numbers, strict=True):
        value = parse_number(number["number"]) if number is not None else None
        if value is None or number is None:
            continue
        key = name.lower()
        if key in _EPOCH_COLUMNS:
            line.epoch = value
        elif key in _STEP_COLUMNS:
            found[key] = value
        elif not is_position(name) and (is_result(name) or "." in number["number"]):
            line.values[name] = value
    line.step = next((to_step(found[key]) for key in _STEP_COLUMNS if key in found), None)
    return line if line.values else None


class Box:
    """Rows of a name and a value, which make one record: its step may come last."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._section = ""

    def add(self, text: str) -> tuple[bool, ParsedLine | None]:
        """Return whether a line is a row of a box, and the record that it ends, if any."""
        cells = _BARS.split(text.strip()) if len(text) <= MAX_LINE_LENGTH else []
        if len(cells) != 4 or cells[0] or cells[3] or _BOX_NAME.fullmatch(cells[1].strip()) is None:
            return False, self.end()
        name, value_text = cells[1].strip(), cells[2].strip()
        cell = _CELL.fullmatch(value_text)
        if not value_text and name.endswith("/"):
            self._section = name
            return True, None
        value = parse_number(cell["number"]) if cell is not None and not cell["rest"] else None
        if value is None:
            return True, None
        # An indented row is of the section above it.
        key = self._section + name if cells[1].startswith("  ") or self._section else name
        ended = self.end() if key in self._values or len(self._values) >= MAX_BOX_ROWS else None
        self._values[key] = value
        return True, ended

    def end(self) -> ParsedLine | None:
        """Return the record of the rows so far; None if there is none, or only a configuration."""
        values, self._values, self._section = self._values, {}, ""
        if not any(map(is_result, values)):
            return None
        last = {name.rpartition("/")[2].lower(): value for name, value in values.items()}
        line = ParsedLine(values={name: value for name, value in values.items() if not is_position(name)})
        line.step = next((to_step(last[key]) for key in _STEP_COLUMNS if key in last), None)
        line.epoch = next((last[key] for key in EPOCH_NAMES if key in last), None)
        return line
