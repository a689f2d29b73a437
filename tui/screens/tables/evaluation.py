"""The reports of `gputrain evaluate`: of all images, and of lists of single ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from engine.base.text import printable
from engine.base.units import format_count, format_score
from engine.report.classes import class_columns, class_rows
from engine.report.table import Align, Column, plain_lines
from tui.screens.tables.confusion import matrix_lines
from tui.screens.tables.mistakes import format_probability, plain_columns

if TYPE_CHECKING:
    from engine.config.tasks import TaskFacts
    from engine.runs.inspection import InspectedImage, Inspection, PartName
    from engine.train.inference.evaluate import CheckpointEvaluation
    from engine.train.inference.inspect import WorstImage
    from engine.train.inference.trained_model import TrainedCheckpoint


# A larger confusion matrix does not fit a terminal.
MAX_MATRIX_CLASSES = 20


TITLES = {
    "mistakes": "Most confident mistakes",
    "uncertain": "Most uncertain images (the two best classes are close)",
    "label-issues": "Suspected wrong labels",
}


def evaluation_lines(result: CheckpointEvaluation, checkpoint: TrainedCheckpoint, split: PartName) -> list[str]:
    """Return the report of `gputrain evaluate`: totals, accuracy per class, confusion matrix."""
    evaluation, metrics, data = result.evaluation, result.evaluation.metrics, result.config.data
    path = data.val_path if split == "val" and data.val_path is not None else data.path
    source = data.dataset if path is None else f"{data.dataset} in {path}"
    tta = "" if result.config.eval.tta == "none" else f", eval.tta={result.config.eval.tta}"
    image_format = result.image_format
    changed = "" if image_format == checkpoint.image_format else f", images: {image_format.describe_evaluation()}"
    images_of = "all splits" if split == "all" else f"split {split}"
    own = [f"{name} {format_score(value)}" for name, value in evaluation.own.items()]
    per_class, details = evaluation.per_class, {"images": result.images_per_class} | evaluation.details
    columns = class_columns(checkpoint.config.task.name, details)
    rows = class_rows(checkpoint.classes, per_class, details)
    has_accuracy = metrics.accuracy is not None
    accuracies = f"  top-1 {format_score(metrics.accuracy)}  top-5 {format_score(evaluation.top5)}" * has_accuracy
    lines = [
        f"{checkpoint.path.name} on {printable(source)}, {images_of}{tta}{changed}",
        f"{format_count(metrics.images)} images  loss {format_score(metrics.loss)}{accuracies}",
        *(["  ".join(own)] if own else []),
        "",
        *plain_lines(columns, rows),
    ]
    if evaluation.confusion and len(checkpoint.classes) <= MAX_MATRIX_CLASSES:
        lines += ["", "confusion matrix (rows: true class, columns: predicted class)"]
        lines += matrix_lines([printable(name) for name in checkpoint.classes], evaluation.confusion)
    return lines


def inspection_lines(
    inspection: Inspection, split: PartName, lists: Mapping[str, Sequence[InspectedImage]]
) -> list[str]:
    """Return the report of `gputrain evaluate --list LIST`: what was inspected, then a table for each list."""
    info, count = inspection.info, inspection.count(split)
    wrong = len(inspection.ranked("mistakes", split))
    epoch = "" if info.epoch is None else f" of epoch {info.epoch}"
    splits = "all splits" if split == "all" else f"split {split}"
    source = info.dataset if info.root is None else f"{info.dataset} {info.root}"
    lines = [
        f"{info.checkpoint}{epoch} on {printable(source)}, {splits}",
        f"{count:,} images, {wrong:,} of them wrong ({format_probability(wrong / max(count, 1))})",
    ]
    for name, images in lists.items():
        lines += ["", TITLES[name], *image_table(images, info.classes)]
    return lines


def worst_image_lines(images: Sequence[WorstImage], facts: TaskFacts) -> list[str]:
    """Return the report of `gputrain evaluate --list mistakes` for labels or numbers."""

    def text(values: Sequence[tuple[str, float]], *, with_values: bool = True) -> str:
        return ", ".join(f"{name} {format_score(value)}" if with_values else name for name, value in values) or "(none)"

    has_values = facts.value != "probability"
    columns: list[Column[WorstImage]] = [
        Column("image", "image", lambda image: image.name),
        Column("loss", "loss", lambda image: format_score(image.loss), Align.RIGHT),
        Column("true", "true", lambda image: text(image.true, with_values=has_values)),
        Column("predicted", "predicted", lambda image: text(image.predicted)),
    ]
    return ["Images with the greatest losses", *plain_lines(columns, images)]


def image_table(images: Sequence[InspectedImage], classes: Sequence[str]) -> list[str]:
    """Return a table of images."""
    return plain_lines(plain_columns(classes), images) if images else ["(none)"]
