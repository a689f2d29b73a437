"""Tables of labels: read a CSV file as columns, and take from them the targets of a task.

`engine.train.data.sources.csv_source` finds the images of the rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern

import numpy as np
from numpy.typing import NDArray

from engine.base.errors import UsageError
from engine.base.files import read_bytes
from engine.base.text import list_names
from engine.config.task_section import TaskName
from engine.train.data.sources.base import Labels

MAX_CSV_BYTES = 1 << 28
# Excel writes semicolons where the comma is the decimal separator. Of equally frequent ones, the first is taken.
SEPARATORS = ",;\t|"
# What separates the labels in a cell: the first that occurs in the column, else spaces.
LABEL_SEPARATORS = ";|,"
# Names of columns, in lower case and without spaces, `-` and `_`, the likeliest first: those of Kaggle's tables.
LABEL_COLUMNS = (
    *("label", "labels", "class", "classes", "classname", "category", "categories", "target", "targets"),
    *("tags", "findinglabels", "diagnosis"),
)
ZERO_OR_ONE = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
MAX_SHOWN_CHARACTERS = 60
MISSING_CELLS = ("", "nan")
COLUMNS_ADVICE = "name the columns of the labels with data.label_columns"
UNKNOWN_ADVICE = "no training image has it; add some, or delete the line"
MAX_FLOAT32 = float(np.finfo(np.float32).max)


def folded(name: str) -> str:
    """Return the name of a column in lower case, without spaces, `-` and `_`."""
    return re.sub(r"[\s_-]", "", name).casefold()


def shown(cell: str) -> str:
    """Return a cell for messages, with the end of a long one cut off."""
    if not cell:
        return "an empty cell"
    return cell if len(cell) <= MAX_SHOWN_CHARACTERS else f"{cell[:MAX_SHOWN_CHARACTERS]}…"


@dataclass(frozen=True)
class LabelTable:
    """The cells of a CSV file by column, without surrounding spaces, and the number of the line of each row."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    def error(self, rows: Sequence[int], reason: str, advice: str = "", *, code: str = "bad-label") -> UsageError:
        """Return the error of some rows, by the lines of the first ones; without rows, that of the whole table."""
        where = f", line{'s' if len(rows) > 1 else ''} {list_names([str(self.lines[row]) for row in rows])}"
        return UsageError.one("data.path", f"{self.path}{where if rows else ''}: {reason}", advice, code=code)

    def refuse_cells(self, column: str, is_bad: Callable[[str], object], advice: str) -> None:
        """Raise UsageError if a cell of a column is bad."""
        cells = self.columns[column]
        if rows := [row for row, cell in enumerate(cells) if is_bad(cell)]:
            reason = f"{column} is {shown(cells[rows[0]])!r}" if cells[rows[0]] else f"{column} is empty"
            raise self.error(rows, reason, advice)


def read_table(path: Path) -> LabelTable:
    """Read a CSV file: its first line has the names of the columns. Raises UsageError, and OSError."""
    text = _decode(path, read_bytes(os.path.realpath(path), MAX_CSV_BYTES))
    first_line = next((line for line in io.StringIO(text) if line.strip()), "")
    separator = max(SEPARATORS, key=first_line.count)
    # Not strict, an open quote would take all lines behind it into one cell.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    header: list[str] = []
    table = LabelTable(path, {}, [])
    columns: list[list[str]] = []
    try:
        for cells in reader:
            if not any(cells):
                continue
            if not header:
                header, columns = [cell.strip() for cell in cells], [[] for _ in cells]
                continue
            table.lines.append(reader.line_num)
            if len(cells) != len(header):
                reason = f"the number of cells is {len(cells)}, and that of columns {len(header)}"
                raise table.error([-1], reason, f"quote cells that contain {separator!r}", code="wrong-format")
            for column, cell in zip(columns, cells, strict=True):
                column.append(intern(cell.strip()))
    except csv.Error as error:
        table.lines.append(reader.line_num)
        raise table.error([-1], str(error), "repair the quotes", code="wrong-format") from error
    if repeated := [name for name, count in Counter(filter(None, header)).items() if count > 1]:
        raise table.error([], f"several columns have the name {repeated[0]}", "rename them", code="wrong-format")
    # A column without a name is the index that pandas writes.
    named = {name: cells for name, cells in zip(header, columns, strict=True) if name and name != "Unnamed: 0"}
    table.columns.update(named)
    if len(named) < 2 or not table.lines:
        contents = "no rows" if len(named) > 1 else f"no columns but {', '.join(named) or 'one without a name'}"
        raise table.error(
            [], f"it has {contents}", "write lines such as image,label and a.jpg,cat", code="wrong-format"
        )
    return table


def _decode(path: Path, data: bytes) -> str:
    """Return the text of a file. Raises UsageError."""
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"{path}, line {line}: the text is not UTF-8"
        advice = "save the table as UTF-8, which Excel calls CSV UTF-8"
        raise UsageError.one("data.path", reason, advice, code="wrong-format") from error
    if "\0" in text:
        raise UsageError.one("data.path", f"{path} is not a text file", code="wrong-format")
    return text


@dataclass(frozen=True)
class Targets:
    """The targets of the rows of a table, the names of the classes, labels or numbers, and their columns."""

    names: tuple[str, ...]
    values: Labels
    columns: tuple[str, ...]


def read_classes(
    table: LabelTable, chosen: tuple[str, ...], others: tuple[str, ...], is_training: NDArray[np.bool_]
) -> Targets:
    """Return the class of each row. The classes are those of the training rows, in the order of their names."""
    columns = chosen or _named_label(others) or others
    if len(columns) != 1:
        is_binary = sum(_is_binary(table.columns[name]) for name in columns) > 1
        wanted = "name only one column with data.label_columns" if chosen else COLUMNS_ADVICE
        advice = f"{wanted}{', or take 0 and 1 as labels with --task multilabel' if is_binary else ''}"
        raise table.error([], f"the label may be in {list_names(columns)}", advice, code="missing-value")
    [column] = columns
    table.refuse_cells(column, _is_missing, "add the label, or delete the line")
    advice = "predict several labels per image with --task multilabel"
    table.refuse_cells(column, lambda cell: ";" in cell or "|" in cell, advice)
    cells = table.columns[column]
    names = tuple(sorted({cell for cell, is_one in zip(cells, is_training, strict=True) if is_one}))
    numbers = [number for name in names if (number := _number(name)) is not None]
    if len(numbers) == len(names) and (len(names) > len(cells) / 2 or not all(map(float.is_integer, numbers))):
        advice = "predict numbers with --task regression"
        raise table.error([], f"{column} looks like numbers, such as {names[0]}", advice)
    index = {name: label for label, name in enumerate(names)}
    table.refuse_cells(column, lambda cell: cell not in index, UNKNOWN_ADVICE)
    return Targets(names, np.array([index[cell] for cell in cells], np.int64), columns)


def read_labels(
    table: LabelTable, chosen: tuple[str, ...], others: tuple[str, ...], is_training: NDArray[np.bool_]
) -> Targets:
    """Return the labels of each row: a column of 0 and 1 for each label, or one column with lists of labels."""
    columns = chosen or _named_label(others) or others
    if len(columns) == 1:
        if _is_binary(table.columns[columns[0]]):
            advice = "predict the two classes with --task classification, or add a column for each other label"
            raise table.error([], f"{columns[0]}, the only column of labels, has 0 and 1", advice)
        return _read_label_lists(table, columns, is_training)
    binary = tuple(name for name in columns if _is_binary(table.columns[name]))
    columns = columns if chosen or len(binary) < 2 else binary
    for name in columns:
        advice = f"write 0 or 1, or {COLUMNS_ADVICE}"
        table.refuse_cells(name, lambda cell: cell.casefold() not in ZERO_OR_ONE, advice)
    values = [[ZERO_OR_ONE[cell.casefold()] for cell in table.columns[name]] for name in columns]
    return Targets(columns, np.array(values, np.uint8).T.copy(), columns)


def _read_label_lists(table: LabelTable, columns: tuple[str, ...], is_training: NDArray[np.bool_]) -> Targets:
    cells = table.columns[columns[0]]
    separator = next((each for each in LABEL_SEPARATORS if any(each in cell for cell in cells)), None)
    # pandas writes a list as ['a', 'b'].
    parts = [[part.strip(" []'\"") for part in cell.split(separator)] for cell in cells]
    rows = [{part for part in row if not _is_missing(part)} for row in parts]
    names = tuple(sorted(set[str]().union(*(row for row, is_one in zip(rows, is_training, strict=True) if is_one))))
    index = {name: label for label, name in enumerate(names)}
    if unknown := [row for row, labels in enumerate(rows) if not labels <= index.keys()]:
        reason = f"{columns[0]} has {shown(min(rows[unknown[0]] - index.keys()))!r}"
        raise table.error(unknown, reason, UNKNOWN_ADVICE)
    values = np.zeros((len(rows), len(names)), np.uint8)
    for row, labels in enumerate(rows):
        values[row, [index[label] for label in labels]] = 1
    return Targets(names, values, columns)


def read_numbers(
    table: LabelTable, chosen: tuple[str, ...], others: tuple[str, ...], is_training: NDArray[np.bool_]
) -> Targets:
    """Return the numbers of each row, a column for each."""
    columns = chosen or _named_label(others) or others
    for column in columns:
        table.refuse_cells(column, _is_missing, "add the number, or delete the line")
        decimal_comma = re.compile(r"[-+]?\d+,\d+")
        table.refuse_cells(column, decimal_comma.fullmatch, "write numbers with a decimal point")
        table.refuse_cells(column, lambda cell: _number(cell) is None, f"write a number, or {COLUMNS_ADVICE}")
    values = [[float(cell) for cell in table.columns[name]] for name in columns]
    return Targets(columns, np.array(values, np.float32).T.copy(), columns)


# A reader gets the columns that the config names, all columns that may have targets, and which rows are for training.
# It raises UsageError.
TARGET_READERS: dict[TaskName, Callable[[LabelTable, tuple[str, ...], tuple[str, ...], NDArray[np.bool_]], Targets]] = {
    "classification": read_classes,
    "multilabel": read_labels,
    "regression": read_numbers,
}


def _is_missing(cell: str) -> bool:
    return cell.casefold() in MISSING_CELLS


def _is_binary(cells: Sequence[str]) -> bool:
    return all(cell.casefold() in ZERO_OR_ONE for cell in cells)


def _named_label(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the column whose name is the likeliest one of labels, or none."""
    names = [name for wanted in LABEL_COLUMNS for name in columns if folded(name) == wanted]
    return tuple(names[:1])


def _number(cell: str) -> float | None:
    """Return a number that float32 can hold; None if the cell has none."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if abs(number) < MAX_FLOAT32 else None
