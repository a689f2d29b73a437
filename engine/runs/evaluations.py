"""evaluation.json of a run: accuracy per class and the confusion matrix of its last and its best epoch.

`engine.train.loop.trainer` writes it. The screen of the confusion matrix and `engine.report` show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from engine.base.codec import (
    ENTRIES,
    UNSET,
    Count,
    FileRecord,
    Finite,
    InvalidRecordError,
    Meta,
    Record,
    UnsetType,
    field,
    read_record,
)
from engine.config.task_section import TaskName
from engine.config.tasks import Mode
from engine.runs.folder import MAX_EVALUATION_BYTES

# The matrix of 1,000 classes has a million counts, most of them 0: 12 MB of JSON.
MAX_DENSE_CLASSES = 100
MAX_SPARSE_CLASSES = 4096
ConfusionCounts = NDArray[np.int64]
Share = Annotated[float, Meta(ge=0, le=1)]


class DenseConfusion(Record, frozen=True, kw_only=True, tag_field="layout", tag="dense"):
    """A confusion matrix: for each true class, how many of its images were predicted as each class."""

    rows: tuple[tuple[Count, ...], ...]


class SparseConfusion(Record, frozen=True, kw_only=True, tag_field="layout", tag="sparse"):
    """The counts of a confusion matrix that are not 0, and their cells in ascending order.

    The cell of a count is true class x number of classes + predicted class.
    """

    cells: tuple[Count, ...]
    counts: tuple[Count, ...]


class StoredEvaluation(Record, frozen=True, kw_only=True):
    """Evaluation of one epoch. `per_class` has the accuracy of each class, null for a class without images; with task
    multilabel the average precision of each label, with task regression the MAE of each number.

    `top1` and `top5` are null, and `confusion` is absent, if the task has none, the latter also if there are too many
    classes to store it. `metrics` are those of the task and the user's own. `thresholds` are the least probabilities at
    which labels are predicted, empty for other tasks. `details` has more metrics of each label or number by name,
    `points` for each number of a regression the predicted and the true ones of some images.
    """

    epoch: Count
    loss: Finite | None
    top1: Share | None
    top5: Share | None
    images: Count
    per_class: tuple[Finite | None, ...]
    confusion: DenseConfusion | SparseConfusion | UnsetType = UNSET
    metrics: dict[str, Finite | None] = field(default_factory=dict)
    thresholds: tuple[Share, ...] = ()
    details: Annotated[dict[str, tuple[Finite | None, ...]], ENTRIES] = field(default_factory=dict)
    points: tuple[tuple[tuple[Finite | None, Finite | None], ...], ...] = ()

    def accuracies(self) -> NDArray[np.float64]:
        """Return the accuracy of each class, NaN for a class without images."""
        return np.array([np.nan if share is None else share for share in self.per_class], np.float64)

    def read_counts(self) -> ConfusionCounts:
        """Return the confusion matrix, true classes in rows, predicted classes in columns; 0 x 0 if it is not stored.

        Raises ValueError or IndexError if it is damaged."""
        confusion, num_classes = self.confusion, len(self.per_class)
        if confusion is UNSET:
            return np.zeros((0, 0), np.int64)
        if isinstance(confusion, DenseConfusion):
            # Of rows of different lengths, NumPy makes no array.
            return np.array(confusion.rows, np.int64).reshape(num_classes, num_classes)
        # Before the matrix takes memory: a file may have any number of classes.
        if num_classes > MAX_SPARSE_CLASSES or len(confusion.cells) != len(confusion.counts):
            raise ValueError("confusion")
        counts = np.zeros(num_classes**2, np.int64)
        counts[list(confusion.cells)] = confusion.counts
        return counts.reshape(num_classes, num_classes)


class EvaluationFile(FileRecord, frozen=True, kw_only=True):
    """The content of evaluation.json: the class names, and the evaluations of the last and the best epoch.

    `classes` are labels or numbers with another `task`.
    """

    classes: Annotated[tuple[str, ...], Meta(min_length=1), ENTRIES]
    last: StoredEvaluation
    best: StoredEvaluation
    task: TaskName = "classification"


@dataclass(frozen=True)
class Mistake:
    """Number of `images` of `true_class` predicted as `predicted_class`, and their `share` of the true class."""

    true_class: int
    predicted_class: int
    images: int
    share: float


def read_evaluations(path: Path) -> EvaluationFile:
    """Read evaluation.json. Raises OSError and InvalidRecordError, also if its parts do not match."""
    stored = read_record(path, EvaluationFile, MAX_EVALUATION_BYTES)
    for name, evaluation in (("last", stored.last), ("best", stored.best)):
        columns = (evaluation.per_class, *evaluation.details.values(), evaluation.points or stored.classes)
        if any(len(column) != len(stored.classes) for column in columns):
            reason = f"it does not match {len(stored.classes)} classes"
            raise InvalidRecordError(f"is damaged: $.{name}.per_class: {reason}")
        try:
            evaluation.read_counts()
        except (ValueError, IndexError) as error:
            reason = f"it does not match {len(stored.classes)} classes"
            raise InvalidRecordError(f"is damaged: $.{name}.confusion: {reason}") from error
    return stored


def to_confusion(counts: Sequence[Sequence[int]]) -> DenseConfusion | SparseConfusion | UnsetType:
    """Return a confusion matrix, given by its rows, as it is stored: sparse if it has many classes."""
    if not counts:
        return UNSET
    if len(counts) <= MAX_DENSE_CLASSES:
        return DenseConfusion(rows=tuple(map(tuple, counts)))
    flat = np.array(counts, np.int64).ravel()
    cells = np.flatnonzero(flat)
    return SparseConfusion(cells=tuple(cells.tolist()), counts=tuple(flat[cells].tolist()))


def mistakes(counts: ConfusionCounts, max_pairs: int = 500) -> list[Mistake]:
    """Return the off-diagonal entries of the confusion matrix, largest first."""
    off_diagonal = counts.copy()
    np.fill_diagonal(off_diagonal, 0)
    true, predicted = np.nonzero(off_diagonal)
    images, class_totals = off_diagonal[true, predicted], counts.sum(1)
    return [
        Mistake(
            int(true[index]),
            int(predicted[index]),
            int(images[index]),
            float(images[index] / class_totals[true[index]]),
        )
        for index in np.argsort(-images, kind="stable")[:max_pairs]
    ]


def worst_first(per_class: NDArray[np.float64], mode: Mode = "max") -> list[int]:
    """Return class indices by ascending accuracy; classes without images come last. With mode min, a great value is
    bad."""
    return [int(number) for number in np.argsort(per_class if mode == "max" else -per_class, kind="stable")]


def finite_points(pairs: Sequence[tuple[float | None, float | None]]) -> NDArray[np.float64]:
    """Return the predicted and true numbers, N x 2, that are finite."""
    return np.array([pair for pair in pairs if None not in pair], np.float64).reshape(-1, 2)


def row_shares(counts: ConfusionCounts) -> NDArray[np.float64]:
    """Normalize each row to sum 1; a row without images stays 0."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares
