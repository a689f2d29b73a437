"""The results of each class, label or number of a task as rows and columns.

`gputrain evaluate` prints them, the screen of the confusion matrix and the page of `engine.report` show them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.base.units import UNKNOWN, format_count, format_score
from engine.config.task_section import TaskName
from engine.config.tasks import TASK_FACTS
from engine.report.table import Align, Column


@dataclass(frozen=True)
class ClassRow:
    """A class with its accuracy, NaN without images, and its number of validation images if it is known."""

    name: str
    accuracy: float
    images: int | None
    details: Mapping[str, float | None] = field(default_factory=dict)


NAME: Column[ClassRow] = Column("name", "class", lambda row: row.name, style="bold")
IMAGES: Column[ClassRow] = Column(
    "images", "images", lambda row: UNKNOWN if row.images is None else format_count(row.images), Align.RIGHT
)
ACCURACY: Column[ClassRow] = Column(
    "accuracy", "accuracy", lambda row: UNKNOWN if math.isnan(row.accuracy) else format_score(row.accuracy),
    Align.RIGHT, width=len("0.1234"),
)  # fmt: skip


def class_columns(task: TaskName, details: Iterable[str]) -> list[Column[ClassRow]]:
    """Return the columns of a table with a header: name, number of images, the metric of the task, and its others."""
    others = [key for key in details if key != IMAGES.key]
    images = [] if len(others) == len(list(details)) else [IMAGES]
    facts = TASK_FACTS[task]
    name = NAME if facts.ranked else replace(NAME, title="name")
    return [name, *images, replace(ACCURACY, title=facts.per_output), *map(_detail, others)]


def class_rows(
    names: Sequence[str], per_class: Sequence[float | None], details: Mapping[str, Sequence[float | None]]
) -> list[ClassRow]:
    """Return the rows of classes, labels or numbers."""
    rows = []
    for number, (name, value) in enumerate(zip(names, per_class, strict=True)):
        others = {key: values[number] for key, values in details.items()}
        images = others.get(IMAGES.key)
        rows.append(
            ClassRow(name, math.nan if value is None else value, None if images is None else int(images), others)
        )
    return rows


def _detail(key: str) -> Column[ClassRow]:
    return Column(key, key, lambda row: format_score(row.details[key]), Align.RIGHT, width=len("0.1234"))
