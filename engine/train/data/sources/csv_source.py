"""Images whose labels are in a CSV file: find the file of each row, and open them as those of a folder.

The images of a part are in the order of their classes, then of their paths, as those of a folder with one subfolder
per class: both give the same batches, whatever the order of the rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath

import numpy as np

from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.files import is_file
from engine.base.text import list_names, pluralize
from engine.config.data_sections import DataConfig
from engine.config.schema import Config
from engine.train.data.sampler import Part
from engine.train.data.sources.csv_table import TARGET_READERS, LabelTable, Targets, folded, read_table, shown
from engine.train.data.sources.folder import (
    FolderScan,
    FolderSource,
    check_images,
    open_scan,
    repeated_image_warnings,
    usage_error_on_os_error,
)
from engine.train.data.sources.folder_layout import PART_NAMES, PART_NOUNS, walk_files
from engine.train.data.sources.tar_index import IMAGE_EXTENSIONS

# Names of columns as `folded` gives them, the likeliest first. A column of another name counts if its cells name files.
IMAGE_COLUMNS = (
    *("image", "imagepath", "imagefile", "filename", "filepath", "file", "path", "imagename", "imageid"),
    *("imageindex", "imgpath", "imgname", "imgid", "img", "photo", "picture", "name", "id"),
)
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
# Rows by which a column is known to name files.
TRIED_ROWS = 50
MAX_LISTED_COLUMNS = 10


class _FileFinder:
    """Finds the files that a table names: by a path relative to its folder, or by a name anywhere below it, also
    without extension."""

    def __init__(self, root: Path) -> None:
        self._root, folders = root, (os.path.normpath(root), os.path.realpath(root))
        self._prefixes = [f"{folder.rstrip('/')}/" for folder in folders]

    def find(self, cell: str) -> list[str] | None:
        """Return the paths that a cell may mean, relative to the folder; None if that is outside."""
        if "\\" in cell and "/" not in cell:
            cell = cell.replace("\\", "/")
        path = os.path.normpath(cell if cell.startswith("/") else self._prefixes[0] + cell)
        inner = next((path.removeprefix(prefix) for prefix in self._prefixes if path.startswith(prefix)), None)
        if inner is None:
            return [] if f"{path}/" in self._prefixes else None
        if is_file(self._root / inner):
            return [inner]
        named = self._by_name.get(PurePath(inner).name, [])
        return [path for path in named if f"/{path}".endswith((f"/{inner}", f"/{inner}{PurePath(path).suffix}"))]

    @cached_property
    def _by_name(self) -> dict[str, list[str]]:
        """The image files below the folder, by name with and without extension."""
        found: dict[str, list[str]] = {}
        for path in walk_files(self._root):
            if path.suffix[1:].lower() in IMAGE_EXTENSIONS:
                for name in (path.name, path.stem):
                    found.setdefault(name, []).append(str(path.relative_to(self._root)))
        return {name: sorted(paths) for name, paths in found.items()}


@dataclass(frozen=True)
class _Rows:
    """The rows of a table: the column of their images, the part of each, and their targets."""

    table: LabelTable
    image_column: str
    parts: list[Part]
    targets: Targets
    finder: _FileFinder
    unused: list[str]

    @property
    def root(self) -> Path:
        """The folder of the table."""
        return self.table.path.parent


@usage_error_on_os_error()
def open_csv(config: Config) -> FolderSource:
    """Open the images that a table names, with its labels and its splits. Raises UsageError."""
    rows = _read_rows(config)
    paths, skipped = _find_files(rows, config.data)
    kept, repeated = _without_repeated_rows(rows, paths)
    skipped = [*(f"column {name} (not used)" for name in rows.unused), *skipped, *repeated]
    return open_scan(_scan(rows, paths, kept, skipped), rows.root, config)


@usage_error_on_os_error()
def class_names(config: Config) -> tuple[str, ...]:
    """Return the names of the classes, labels or numbers of a table without opening any image. Raises UsageError."""
    return _read_rows(config).targets.names


def _read_rows(config: Config) -> _Rows:
    data, table = config.data, read_table(Path(str(config.data.path)))
    if unknown := [name for name in data.label_columns if name not in table.columns]:
        columns = list_names(list(table.columns), MAX_LISTED_COLUMNS)
        reason = f"{table.path} has no column {unknown[0]}; its columns are {columns}"
        raise UsageError.one("data.label_columns", reason, code="not-found")
    finder = _FileFinder(table.path.parent)
    image_column = _image_column(table, finder, data.label_columns)
    split_column = _split_column(table)
    parts: list[Part] = ["train"] * len(table.lines)
    if split_column is not None:
        advice = "write train, val or test"
        table.refuse_cells(split_column, lambda cell: cell.casefold() not in PART_NAMES, advice)
        parts = [PART_NAMES[cell.casefold()] for cell in table.columns[split_column]]
        if "train" not in parts:
            reason = f"{split_column} is train in no line"
            raise table.error([], reason, "write train into the lines of training images", code="no-images")
    others = tuple(name for name in table.columns if name not in (image_column, split_column))
    # Beside the column of the images, one such as id numbers the rows.
    others = tuple(name for name in others if folded(name) not in IMAGE_COLUMNS) or others
    if not others:
        raise table.error([], f"it has no column of labels beside {image_column}", code="wrong-format")
    is_training = np.array([part == "train" for part in parts])
    targets = TARGET_READERS[config.task.name](table, data.label_columns, others, is_training)
    unused = [name for name in table.columns if name not in (image_column, split_column, *targets.columns)]
    return _Rows(table, image_column, parts, targets, finder, unused)


def _image_column(table: LabelTable, finder: _FileFinder, label_columns: tuple[str, ...]) -> str:
    """Return the column that names the image files. Raises UsageError."""
    candidates = [name for name in table.columns if name not in label_columns]
    named = [name for wanted in IMAGE_COLUMNS for name in candidates if folded(name) == wanted]
    if not named and any(finder.find(name) for name in candidates):
        reason = "the first line names an image, not the columns"
        raise table.error([], reason, "add a line above, such as image,label", code="wrong-format")
    for name in dict.fromkeys((*named, *candidates)):
        if any(finder.find(cell) for cell in table.columns[name][:TRIED_ROWS]):
            return name
    if named:
        # That its files are missing is said with their names.
        return named[0]
    reason = f"no column ({list_names(candidates, MAX_LISTED_COLUMNS)}) names image files below {table.path.parent}"
    raise table.error([], reason, "write paths relative to that folder into a column image", code="not-found")


def _split_column(table: LabelTable) -> str | None:
    """Return the column that names the part of each image, if there is one."""
    for name, cells in table.columns.items():
        is_known = folded(name) == SPLIT_COLUMNS[0] or any(cell.casefold() in PART_NAMES for cell in cells)
        if folded(name) in SPLIT_COLUMNS and is_known:
            return name
    return None


def _find_files(rows: _Rows, data: DataConfig) -> tuple[list[str], list[str]]:
    """Return the path of the file of each row, empty if it is missing, and the missing ones. Raises UsageError."""
    table, cells = rows.table, rows.table.columns[rows.image_column]
    found = [rows.finder.find(cell) for cell in cells]
    if outside := [row for row, paths in enumerate(found) if paths is None]:
        reason = f"{shown(cells[outside[0]])} is outside of {rows.root}, the folder of the table"
        raise table.error(outside, reason, "move the table to a folder that contains all images", code="not-supported")
    if ambiguous := [row for row, paths in enumerate(found) if paths and len(paths) > 1]:
        reason = f"{shown(cells[ambiguous[0]])} may be {list_names(found[ambiguous[0]] or [])}"
        advice = f"write paths relative to {rows.root}"
        raise table.error(ambiguous, reason, advice, code="ambiguous-name")
    missing = [row for row, paths in enumerate(found) if not paths]
    if missing and (data.on_bad == "fail" or len(missing) == len(found)):
        names = list_names([shown(cells[row]) for row in missing])
        reason = f"{len(missing)} of {pluralize(len(found), 'image')} do not exist below {rows.root}: {names}"
        advice = "correct the names"
        advice += ", or skip these lines with data.on_bad=skip" if len(missing) < len(found) else ""
        raise table.error(missing, reason, advice, code="not-found")
    skipped = [f"{shown(cells[row])} (line {table.lines[row]}: no such file)" for row in missing]
    return [paths[0] if paths else "" for paths in found], skipped


def _without_repeated_rows(rows: _Rows, paths: list[str]) -> tuple[list[int], list[str]]:
    """Return the rows whose images no earlier row has, and the other ones. Raises UsageError if they contradict."""
    table, values, first = rows.table, rows.targets.values, dict[str, int]()
    repeated = []
    for row, path in enumerate(paths):
        if not path or (before := first.setdefault(path, row)) == row:
            continue
        for what, differ in (
            ("splits", rows.parts[row] != rows.parts[before]),
            ("labels", not np.array_equal(values[row], values[before])),
        ):
            if differ:
                raise table.error([before, row], f"{path} has different {what}", "keep one line", code="conflict")
        repeated.append(f"line {table.lines[row]} (the same as line {table.lines[before]})")
    return list(first.values()), repeated


def _scan(rows: _Rows, paths: list[str], kept: list[int], skipped: list[str]) -> FolderScan:
    """Return the readable images of the kept rows. Raises UsageError."""
    names, values = rows.targets.names, rows.targets.values
    classes = values if values.ndim == 1 else np.zeros(len(values), np.int64)
    files = {row: rows.root / paths[row] for row in kept}
    order = sorted(kept, key=lambda row: (classes[row], files[row]))
    readable, unreadable = check_images([files[row] for row in order], rows.table.path)
    skipped += [f"{path.relative_to(rows.root)} ({reason})" for path, reason in unreadable]
    problems: list[Problem] = []
    scan = FolderScan(names, {}, {}, {}, {}, (), ())
    for part in (part for part in PART_NOUNS if part in rows.parts):
        of_part = [row for row in order if rows.parts[row] == part and files[row] in readable]
        if not of_part and part == "test":
            skipped.append("test (not evaluated: no readable image)")
            continue
        if not of_part:
            reason = f"{rows.table.path} names no readable {PART_NOUNS[part]} image"
            problems.append(Problem("data.path", reason, "add images", code="no-images"))
        facts = np.array([readable[files[row]] for row in of_part], np.int64).reshape(-1, 4)
        scan.paths[part], scan.labels[part] = [paths[row] for row in of_part], values[of_part]
        scan.sizes[part], scan.digests[part] = facts[:, 0], facts[:, 3]
    raise_if_any(problems)
    warnings = tuple(repeated_image_warnings(scan.paths, scan.digests))
    return replace(scan, skipped=tuple(skipped), warnings=warnings)
