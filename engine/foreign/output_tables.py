"""Tables in the output of a training: rows below a heading of names.

`output_metrics` gives it the lines one after another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.foreign.line_metrics import MAX_LINE_LENGTH, ParsedLine
from engine.foreign.line_names import is_position, is_result, is_source, is_weak_result, source_of, with_source
from engine.foreign.line_prefix import strip_prefix
from engine.foreign.reading import EPOCH_NAMES, first_column, to_epoch, to_step

MIN_HEADING_COLUMNS = 3  # two where the columns are marked
MAX_OTHER_LINES = 100  # below a heading, until a table is over
MAX_COLUMNS = 200
_HEADING_NAME = re.compile(r"[A-Za-z#][\w@./%()#-]*+(?: [A-Za-z/(%][\w@./%()#-]*+){0,3}")
# What a progress bar adds to a row or a heading: `: 100%|███`
_TABLE_END = re.compile(r":\s{1,8}\d{1,3}%")
_UNDERLINE = re.compile(r"[\s|+:=─━┌┬┐├┼┤└┴┘┏┳┓┡╇┩╈┗┻┛╭╮╰╯-]{3,}")
_CELL = re.compile(
    r"(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)"
    r"(?P<rest>/\d+|\s?%|\s?\([\d.%]+\)|\s?[A-Za-zµ]{1,3}(?:/\w{1,5})?)?",
    re.IGNORECASE,
)
_COLUMNS = re.compile(r"\s{2,}|\t")
_COMMAS = re.compile(",")
_LABEL = re.compile(r"^[\w.]{1,40}: ")
# Without a prefix or a label
_PLAIN_ROW = re.compile(r"[-+.,0-9eE ]+")
_BARS = re.compile(r"[|│┃]")
# The row that sums up all classes
_SUMMARY = re.compile(r"all|mean|average|overall|total|(?:macro|micro|weighted|samples) avg", re.IGNORECASE)
_STEP_COLUMNS = (
    "total_timesteps", "global_step", "step", "steps", "num_updates", "iteration", "iterations", "iter", "it", "#",
    "batch", "training_iteration",
)  # fmt: skip
_EPOCH_COLUMNS = (*EPOCH_NAMES, "e")


@dataclass
class _Heading:
    names: list[str]
    separator: re.Pattern[str]
    is_sure: bool
    """Whether the names are known to be those of columns: results are among them, or a line is drawn below."""

    def __post_init__(self) -> None:
        self.step, self.epoch = first_column(self.names, _STEP_COLUMNS), first_column(self.names, _EPOCH_COLUMNS)
        self.are_sources = all(map(is_source, self.names))
        self.results = {name for name in self.names if is_result(name) or is_weak_result(name)}


class Tables:
    """The table that the latest lines belong to."""

    def __init__(self) -> None:
        self._heading: _Heading | None = None
        self._num_other = 0

    def read(self, text: str) -> ParsedLine | None:
        """Return the values of a row; None if the line is no row of the latest heading."""
        if self._heading is None or len(text) > MAX_LINE_LENGTH:
            return None
        row = _row(_cells(text, self._heading.separator), self._heading)
        self._num_other = 0 if row is not None else self._num_other + 1
        if self._num_other > (MAX_OTHER_LINES if self._heading.is_sure else 2):
            self._heading = None
        return row

    def is_heading(self, text: str) -> bool:
        """Note the heading of a table, and the line below it."""
        if len(text) > MAX_LINE_LENGTH:
            return False
        if self._heading is not None and self._num_other == 0 and _UNDERLINE.fullmatch(text):
            self._heading.is_sure = True
            return True
        heading = _parse_heading(text)
        if heading is None:
            return False
        self._heading, self._num_other = heading, 0
        return heading.is_sure


def _parse_heading(text: str) -> _Heading | None:
    """Return the names of the columns of a table; None for any other line."""
    text = _without_bar(text)
    if (
        not text
        or not ("  " in text or "," in text or "\t" in text or _has_bars(text))
        or text[-1] in ".;!?"
        or (text[0].isdigit() and "," not in text)
    ):
        return None
    separator = _BARS if _has_bars(text) else _COLUMNS if "  " in text or "\t" in text else _COMMAS
    names = _cells(text, separator)
    if not all(_HEADING_NAME.fullmatch(name) for name in names[1:]) or not names[1:]:
        return None
    cleaned, group = [], ""
    for name in map(_column_name, filter(None, names)):
        group = name.rpartition("/")[0] or group
        # `Box(P  R)  Mask(P  R)`
        cleaned.append(f"{group}/{name}" if name in cleaned and group else name)
    is_marked = separator is _BARS or "\t" in text
    if len(cleaned) < (2 if is_marked else MIN_HEADING_COLUMNS) or not _HEADING_NAME.fullmatch(cleaned[0]):
        return None
    # A sentence has few names of results in it.
    is_sure = sum(map(is_result, cleaned)) * 6 >= len(cleaned) or (separator is _BARS and all(map(is_source, cleaned)))
    return _Heading(cleaned, separator, is_sure) if is_sure or separator is not _COMMAS else None


def _without_bar(text: str) -> str:
    end = _TABLE_END.search(text) if "%" in text else None
    return (text[: end.start()] if end is not None else text).strip()


def _has_bars(text: str) -> bool:
    return "|" in text or "│" in text or "┃" in text


def _column_name(name: str) -> str:
    words = re.sub(r"(?<=\w)\s?\([\w/% ]*\)$", "", name).strip("():").replace("(", "/").split()
    return words[0] if len(words) == 1 else "_".join(words).lower() or name


def _cells(text: str, separator: re.Pattern[str]) -> list[str]:
    text = _without_bar(text)
    if separator is not _COLUMNS and _PLAIN_ROW.fullmatch(text) is None:
        text = (strip_prefix(text) or "").strip()
        text = _LABEL.sub("", text, count=1) if separator is _COMMAS else text
    cells = [*map(str.strip, separator.split(text, MAX_COLUMNS))]
    return cells[1:-1] if len(cells) > 2 and not cells[0] and not cells[-1] else cells


def _number_of(cell: str) -> str:
    """Return the number of a cell without its unit; "" if it has none."""
    if cell.replace(".", "", 1).isdecimal():  # in a fifth of the time of the pattern
        return cell
    return match["number"] if (match := _CELL.fullmatch(cell)) is not None else ""


def _row(cells: Sequence[str], heading: _Heading) -> ParsedLine | None:
    """Return the values of a row. It may have a cell more than the heading has names: a label, or the index."""
    names, label = heading.names, ""
    if heading.separator is _COLUMNS and len(cells) not in (len(names), len(names) + 1):
        cells = " ".join(cells).split()
    if len(cells) == len(names) + 1 and heading.is_sure:
        label, *cells = cells
    if len(cells) != len(names):
        return None
    texts = {name: number for name, cell in zip(names, cells, strict=True) if (number := _number_of(cell))}
    is_summary = _SUMMARY.fullmatch(label or cells[0]) is not None
    is_index = label.isdigit() and "support" not in names
    is_labeled = is_summary or (bool(label) and heading.are_sources)
    if not (is_labeled or is_index if label else is_labeled or names[0] in texts or heading.step in texts):
        return None
    if len(texts) * 2 < len(cells):
        return None
    values = {name: float(number) for name, number in texts.items()}
    epoch, step = values.pop(heading.epoch or "", None), values.pop(heading.step or "", None)
    step = float(label) if is_index and step is None else step
    line = ParsedLine(held_out=is_summary, epoch=to_epoch(epoch), step=to_step(step))
    for name, value in values.items():
        if label and heading.are_sources:
            line.values[with_source(label, source_of(name))] = value
        elif name in heading.results or ("." in texts[name] and not is_position(name)):
            line.values[f"{label}/{name}".replace(" ", "_") if label and is_summary else name] = value
    return line if line.values else None
