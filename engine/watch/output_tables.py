"""Tables in the output of a training: rows below a heading of names.

`output_metrics` gives it the lines one after another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.watch.line_metrics import MAX_LINE_LENGTH
from engine.watch.line_names import is_position, is_result, is_source, is_weak_result, source_of, with_source
from engine.watch.line_plan import Plan, StepNumber
from engine.watch.line_prefix import strip_prefix
from engine.watch.reading import EPOCH_NAMES, first_column

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
CELL_IN_ROW = re.compile(rf"(?<![^\s,|│┃]){_CELL.pattern}(?![^\s,|│┃])", re.IGNORECASE)
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


@dataclass(eq=False)
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
        self.heading: _Heading | None = None
        """The heading of a table that is not over."""
        self.num_other = 0
        """Lines below the latest row."""

    def read(self, text: str) -> tuple[Plan, list[str]] | None:
        """Return what a row means, and its numbers; None if the line is no row of the latest heading."""
        if self.heading is None or len(text) > MAX_LINE_LENGTH:
            return None
        row = _row(_cells(text, self.heading.separator), self.heading)
        self.num_other = 0 if row is not None else self.num_other + 1
        if self.num_other > (MAX_OTHER_LINES if self.heading.is_sure else 2):
            self.heading = None
        return row

    def is_heading(self, text: str) -> bool:
        """Note the heading of a table, and the line below it."""
        if len(text) > MAX_LINE_LENGTH:
            return False
        if self.heading is not None and self.num_other == 0 and _UNDERLINE.fullmatch(text):
            self.heading.is_sure = True
            return True
        heading = _parse_heading(text)
        if heading is None:
            return False
        self.heading, self.num_other = heading, 0
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
    return match["number"] if (match := _CELL.fullmatch(cell)) is not None else ""


def _row(cells: Sequence[str], heading: _Heading) -> tuple[Plan, list[str]] | None:
    """Return what a row means. It may have a cell more than the heading has names: a label, or the index."""
    names, label = heading.names, ""
    if heading.separator is _COLUMNS and len(cells) not in (len(names), len(names) + 1):
        cells = " ".join(cells).split()
    if len(cells) == len(names) + 1 and heading.is_sure:
        label, *cells = cells
    if len(cells) != len(names):
        return None
    is_summary = _SUMMARY.fullmatch(label or cells[0]) is not None
    is_index = label.isdigit() and "support" not in names
    numbers, found = [label] if is_index else [], dict[str, int]()
    for name, cell in zip(names, cells, strict=True):
        if number := _number_of(cell):
            found[name] = len(numbers)
            numbers.append(number)
    is_labeled = is_summary or (bool(label) and heading.are_sources)
    if not (is_labeled or is_index if label else is_labeled or names[0] in found or heading.step in found):
        return None
    if len(found) * 2 < len(cells):
        return None
    plan = Plan(held_out=is_summary, is_accepted=True)
    for name, index in found.items():
        if name == heading.epoch:
            plan.epoch = index
        elif name == heading.step:
            plan.steps = [StepNumber(index)]
        elif label and heading.are_sources:
            plan.pairs.append((with_source(label, source_of(name)), index, 1.0))
        elif name in heading.results or ("." in numbers[index] and not is_position(name)):
            full_name = f"{label}/{name}".replace(" ", "_") if label and is_summary else name
            plan.pairs.append((full_name, index, 1.0))
    if is_index and not plan.steps:
        plan.steps = [StepNumber(0)]
    return (plan, numbers) if plan.pairs else None
