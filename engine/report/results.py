"""What a page says of the classes and images of one run: confusion matrix, accuracy per class, worst images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.report.pictures import Picture, matrix_picture, thumbnail
from engine.report.runs import OwnRun
from engine.report.sections import Table, short_name
from engine.runs.evaluations import read_evaluations, worst_first
from engine.runs.inspection import PartName
from engine.runs.inspection_file import read_inspection
from engine.show.table import Column
from engine.utils.codec import InvalidRecordError
from engine.utils.units import UNKNOWN, format_score, format_share

MAX_CLASSES = 200
# Up to 10 KB each.
MAX_WORST_IMAGES = 24
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
    has_matrix = len(best.counts) > 0
    rows = []
    for index in worst_first(best.per_class):
        accuracy, images = float(best.per_class[index]), f"{int(best.counts[index].sum()):,}" if has_matrix else ""
        text = f"{accuracy:.4f}" if math.isfinite(accuracy) else UNKNOWN
        rows.append((short_name(evaluations.classes[index]), images, text))
    table = Table(CLASS_COLUMNS, rows[:MAX_CLASSES], len(rows) - MAX_CLASSES)
    return ClassSection(head, matrix_picture(best.counts) if has_matrix else None, table)


class ImageSection(NamedTuple):
    """The images that the model gets wrong. `note` says what they are of, or how to make them."""

    note: str
    mistakes: Sequence[Mapping[str, Any]] = ()


def image_section(run: OwnRun) -> ImageSection:
    """Return the most confident mistakes of the inspection of a run."""
    command = f"gputrain evaluate {run.name} --list mistakes"
    try:
        inspection = read_inspection(run.folder)
    except InvalidRecordError as error:
        return ImageSection(f"{run.folder.inspection.name} {error}; {command} makes it again.")
    if inspection is None:
        return ImageSection(f"This run has no inspection yet: make it with {command}, then repeat the report.")
    # The model has not seen the images of validation.
    part: PartName = "val" if inspection.info.covers("val") else "all"
    rows, classes = inspection.ranked("mistakes", part), inspection.info.classes
    images = [
        {
            "picture": thumbnail(run.folder, inspection, image),
            "name": image.name,
            "label": short_name(classes[image.label]),
            "predicted": short_name(classes[image.predicted]),
            "probability": format_share(image.probability),
        }
        for image in inspection.images(rows[:MAX_WORST_IMAGES])
    ]
    note = f"{inspection.info.checkpoint} gets {len(rows):,} of {inspection.count(part):,} images wrong."
    return ImageSection(note, images)
