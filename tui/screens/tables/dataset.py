"""The report of `gputrain data`, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.base.text import pluralize, printable
from engine.base.units import format_count
from engine.report.table import Align, Column, plain_lines
from tui.screens.tables import fact_lines

if TYPE_CHECKING:
    from engine.train.dataset_view import Dataset


BAR_COLUMNS = 30
COUNT_COLUMNS = 7


@dataclass(frozen=True)
class ClassCount:
    """A class and its number of images in each part, or the range of a number; the last row has all images."""

    name: str
    train: int
    val: int
    test: int = 0
    span: str = field(default="", kw_only=True)
    is_total: bool = field(default=False, kw_only=True)


def count_columns(most: int, *, has_test: bool) -> list[Column[ClassCount]]:
    """Return the columns for classes of at most `most` training images, which have a bar of full length."""
    test = Column[ClassCount]("test", "test", lambda row: format_count(row.test), Align.RIGHT, COUNT_COLUMNS)
    return [
        Column("name", "class", lambda row: row.name),
        Column("train", "train", lambda row: format_count(row.train), Align.RIGHT, COUNT_COLUMNS),
        Column("val", "val", lambda row: format_count(row.val), Align.RIGHT, COUNT_COLUMNS),
        *([test] if has_test else []),
        Column("bar", "", lambda row: row.span or "█" * (not row.is_total and round(BAR_COLUMNS * row.train / most))),
    ]


MAX_LISTED_FILES = 10


def dataset_lines(dataset: Dataset) -> list[str]:
    """Return the report of `gputrain data`: a bar per class, image files, input of the network, skipped files."""
    counts = dataset.counts
    spans = [", ".join(f"{name} {value:.6g}" for name, value in span.items()) for span in dataset.spans()]
    named = zip(dataset.source.classes, spans, *counts.values(), strict=True)
    rows = [ClassCount(name, *row, span=span) for name, span, *row in named]
    total = ClassCount("all", *map(dataset.source.num_images, counts), is_total=True)
    columns = count_columns(max((*counts["train"], 1)), has_test="test" in counts)
    lines = [*plain_lines(columns, [*rows, total]), ""]
    skipped, facts = dataset.source.skipped, dict[str, object]()
    if (files := dataset.files) is not None:
        smallest, median, largest = (f"{width} x {height}" for width, height in files.sizes)
        modes = ", ".join(f"{mode} {count:,}" for mode, count in files.modes.items())
        facts = {
            "image files": f"{smallest} to {largest}, median {median}" if smallest != largest else median,
            "modes": f"{modes} of {pluralize(files.examined, 'examined file')}",
        }
    facts["input"] = f"{dataset.image_format.describe()}, channels {dataset.image_format.channels}"
    if skipped:
        facts["skipped"] = f"{pluralize(len(skipped), 'item')}:"
    lines += fact_lines(facts)
    lines += [f"  {printable(name)}" for name in skipped[:MAX_LISTED_FILES]]
    if len(skipped) > MAX_LISTED_FILES:
        lines.append(f"  and {len(skipped) - MAX_LISTED_FILES} more")
    return lines
