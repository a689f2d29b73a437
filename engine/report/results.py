"""What a page says of the classes and images of one run: confusion matrix, accuracy per class, worst images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.report.pictures import Picture, matrix_levels, matrix_picture, thumbnail
from engine.report.runs import OwnRun, read_run_evaluations
from engine.runs.evaluations import EpochEvaluation, mistakes, worst_first
from engine.runs.inspection import Inspection, PartName, Rows
from engine.runs.inspection_file import read_inspection
from engine.utils.codec import InvalidRecordError
from engine.utils.units import UNKNOWN, format_score, format_share

# A larger matrix is a picture.
MAX_TABLE_CLASSES = 20
MAX_CONFUSED_PAIRS, MAX_WORST_CLASSES, MAX_CLASSES = 20, 30, 2000
# Up to 10 KB each.
MAX_WORST_IMAGES, MAX_SUSPECTED_IMAGES = 24, 12
MAX_NAME_CHARACTERS = 60


@dataclass(frozen=True)
class Cell:
    """A cell of the confusion matrix: number of images, how dark it is (0 to 100), whether it is on the diagonal."""

    count: int
    level: int
    is_right: bool


@dataclass(frozen=True)
class ClassRow:
    """Accuracy of one class: as text, and as the length of a bar (0 to 100)."""

    name: str
    images: str
    accuracy: str
    bar: float


@dataclass(frozen=True)
class ClassSection:
    """Results by class of the best epoch. `matrix` has the rows of a small matrix, `picture` is a large one."""

    head: str
    problem: str = ""
    classes: tuple[str, ...] = ()
    matrix: tuple[tuple[Cell, ...], ...] = ()
    picture: Picture | None = None
    confused: tuple[tuple[str, str, str, str], ...] = ()
    worst: tuple[ClassRow, ...] = ()
    others: tuple[ClassRow, ...] = ()
    more: int = 0


def class_section(run: OwnRun) -> ClassSection:
    """Return the confusion matrix and the accuracy per class of the best epoch."""
    evaluations, problem = read_run_evaluations(run.folder)
    if evaluations is None:
        return ClassSection("", problem)
    best, classes = evaluations.best, tuple(map(short_name, evaluations.classes))
    loss = UNKNOWN if best.loss is None else format_score(best.loss)
    head = (
        f"Best epoch {best.epoch}: {best.images:,} validation images, loss {loss}, "
        f"top-1 {format_score(best.top1)}, top-5 {format_score(best.top5)}"
    )
    has_matrix = len(best.counts) > 0
    matrix: tuple[tuple[Cell, ...], ...] = ()
    if has_matrix and len(classes) <= MAX_TABLE_CLASSES:
        levels = matrix_levels(best.counts)
        matrix = tuple(
            tuple(
                Cell(int(count), int(level), row == column)
                for column, (count, level) in enumerate(zip(best.counts[row], levels[row], strict=True))
            )
            for row in range(len(classes))
        )
    pairs = mistakes(best.counts, MAX_CONFUSED_PAIRS) if has_matrix else []
    confused = tuple(
        (classes[pair.true_class], classes[pair.predicted_class], f"{pair.images:,}", format_share(pair.share))
        for pair in pairs
    )
    rows = _class_rows(best, classes)
    return ClassSection(
        head=head,
        problem="" if has_matrix else "The confusion matrix of so many classes is not stored.",
        classes=classes,
        matrix=matrix,
        picture=matrix_picture(best.counts) if has_matrix and not matrix else None,
        confused=confused,
        worst=tuple(rows[:MAX_WORST_CLASSES]),
        others=tuple(rows[MAX_WORST_CLASSES:MAX_CLASSES]),
        more=max(len(rows) - MAX_CLASSES, 0),
    )


def _class_rows(evaluation: EpochEvaluation, classes: tuple[str, ...]) -> list[ClassRow]:
    """Return the classes, the least accurate first."""
    images = evaluation.counts.sum(1) if len(evaluation.counts) else None
    rows = []
    for index in worst_first(evaluation.per_class):
        accuracy = float(evaluation.per_class[index])
        known = math.isfinite(accuracy)
        count = "" if images is None else f"{int(images[index]):,}"
        text = f"{accuracy:.4f}" if known else UNKNOWN
        rows.append(ClassRow(classes[index], count, text, round(100 * accuracy, 1) if known else 0.0))
    return rows


def short_name(name: str) -> str:
    """Return a name of bounded length."""
    return name if len(name) <= MAX_NAME_CHARACTERS else name[: MAX_NAME_CHARACTERS - 1] + "…"


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
    """Lists of images that the model gets wrong. `note` says what they are of, or how to make them."""

    note: str
    mistakes: tuple[ShownImage, ...] = ()
    suspected: tuple[ShownImage, ...] = ()
    more_mistakes: int = 0


def image_section(run: OwnRun) -> ImageSection:
    """Return the most confident mistakes and the suspected wrong labels of the inspection of a run."""
    command = f"gputrain evaluate {run.name} --list mistakes"
    try:
        inspection = read_inspection(run.folder)
    except InvalidRecordError as error:
        return ImageSection(f"{run.folder.inspection.name} {error}; {command} makes it again.")
    if inspection is None:
        return ImageSection(f"This run has no inspection yet: make it with {command}, then repeat the report.")
    # The model has not seen the images of validation.
    part: PartName = "val" if inspection.info.covers("val") else "all"
    rows = inspection.ranked("mistakes", part)
    place = f"step {inspection.info.step}" if inspection.info.epoch is None else f"epoch {inspection.info.epoch}"
    images = inspection.count(part)
    note = f"{inspection.info.checkpoint} of {place} gets {len(rows):,} of {images:,} images wrong."
    if inspection.info.overrides:
        note += f" The images are of other data: {' '.join(inspection.info.overrides)}."
    suspected = inspection.ranked("label-issues", part, MAX_SUSPECTED_IMAGES)
    return ImageSection(
        note,
        _shown(run, inspection, rows[:MAX_WORST_IMAGES]),
        _shown(run, inspection, suspected),
        max(len(rows) - MAX_WORST_IMAGES, 0),
    )


def _shown(run: OwnRun, inspection: Inspection, rows: Rows) -> tuple[ShownImage, ...]:
    classes = inspection.info.classes
    return tuple(
        ShownImage(
            thumbnail(run.folder, inspection, image),
            image.name,
            short_name(classes[image.label]),
            short_name(classes[image.predicted]),
            format_share(image.probability),
        )
        for image in inspection.images(rows)
    )
