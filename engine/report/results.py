"""What a page says of the classes and images of one run: confusion matrix, accuracy per class, worst images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.report.pictures import Picture, matrix_picture, thumbnail
from engine.report.runs import OwnRun, read_run_evaluations
from engine.report.sections import Table, short_name
from engine.runs.evaluations import worst_first
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


@dataclass(frozen=True)
class ClassSection:
    """Results by class of the best epoch, or in `head` why there are none."""

    head: str
    matrix: Picture | None = None
    accuracies: Table[tuple[str, str, str]] | None = None


def class_section(run: OwnRun) -> ClassSection:
    """Return the confusion matrix and the accuracy per class of the best epoch, the least accurate class first."""
    evaluations, problem = read_run_evaluations(run.folder)
    if evaluations is None:
        return ClassSection(problem)
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


@dataclass(frozen=True)
class ShownImage:
    """An image of a list: its picture, its name, its label, and what the model takes it for."""

    picture: Picture
    name: str
    label: str
    predicted: str
    probability: str


@dataclass(frozen=True)
class ImageSection:
    """The images that the model gets wrong. `note` says what they are of, or how to make them."""

    note: str
    mistakes: tuple[ShownImage, ...] = ()


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
    images = tuple(
        ShownImage(
            thumbnail(run.folder, inspection, image),
            image.name,
            short_name(classes[image.label]),
            short_name(classes[image.predicted]),
            format_share(image.probability),
        )
        for image in inspection.images(rows[:MAX_WORST_IMAGES])
    )
    note = f"{inspection.info.checkpoint} gets {len(rows):,} of {inspection.count(part):,} images wrong."
    return ImageSection(note, images)
