"""What a page says of the classes of one run: confusion matrix, and accuracy per class."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.report.pictures import Picture, matrix_picture
from engine.report.runs import OwnRun
from engine.report.sections import Table, short_name
from engine.runs.evaluations import read_evaluations, worst_first
from engine.show.table import Column
from engine.utils.codec import InvalidRecordError
from engine.utils.units import UNKNOWN, format_score

MAX_CLASSES = 200
CLASS_COLUMNS: tuple[Column[tuple[str, str, str]], ...] = (
    Column("class", "class", lambda row: row[0]),
    Column("images", "images", lambda row: row[1]),
    Column("accuracy", "accuracy", lambda row: row[2]),
)


class ClassSection(NamedTuple):
    """Results by class of the best epoch, or in `head` why there are none."""

    head: str
    matrix: Picture | None = None
    accuracies: Table[tuple[str, str, str]] | None = None


def class_section(run: OwnRun) -> ClassSection:
    """Return the confusion matrix and the accuracy per class of the best epoch, the least accurate class first."""
    path = run.folder.evaluation
    try:
        evaluations = read_evaluations(path)
    except FileNotFoundError:
        return ClassSection("The run has no evaluation yet: it is written at the end of each epoch.")
    except OSError as error:
        return ClassSection(f"{path.name} cannot be read: {error.strerror}")
    except InvalidRecordError as error:
        return ClassSection(f"{path.name} {error}")
    best = evaluations.best
    loss = UNKNOWN if best.loss is None else format_score(best.loss)
    head = (
        f"Best epoch {best.epoch}: {best.images:,} validation images, loss {loss}, "
        f"top-1 {format_score(best.top1)}, top-5 {format_score(best.top5)}."
    )
    counts, accuracies = best.read_counts(), best.accuracies()
    rows = []
    for index in worst_first(accuracies):
        accuracy, images = float(accuracies[index]), f"{int(counts[index].sum()):,}" if len(counts) else ""
        text = f"{accuracy:.4f}" if math.isfinite(accuracy) else UNKNOWN
        rows.append((short_name(evaluations.classes[index]), images, text))
    table = Table(CLASS_COLUMNS, rows[:MAX_CLASSES], len(rows) - MAX_CLASSES)
    return ClassSection(head, matrix_picture(counts) if len(counts) else None, table)
