"""Reads evaluation.json of a run: accuracy per class and the confusion matrix of its last and its best epoch.

`engine.training.metrics` defines the format. The screen of the confusion matrix and `engine.report` show it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runs.folder import MAX_EVALUATION_BYTES
from engine.utils.files import read_bytes

# The second has confusion matrices of many classes without their zeros.
EVALUATION_FORMATS = (1, 2)
# The matrix of 1,000 classes has a million counts, most of them 0: 12 MB of JSON.
MAX_DENSE_CLASSES = 100
MAX_SPARSE_CLASSES = 4096
ConfusionCounts = NDArray[np.int64]


@dataclass(frozen=True)
class EpochEvaluation:
    """Evaluation of one epoch.

    `per_class` holds the accuracy of each class, NaN for a class without images. `counts` is the confusion matrix, true
    classes in rows and predicted classes in columns, or 0 x 0 if there are too many classes to store it.
    """

    epoch: int
    loss: float | None
    top1: float
    top5: float
    images: int
    per_class: NDArray[np.float64]
    counts: ConfusionCounts


@dataclass(frozen=True)
class RunEvaluations:
    """Class names of a run, and the evaluations of its last and its best epoch."""

    classes: tuple[str, ...]
    last: EpochEvaluation
    best: EpochEvaluation


@dataclass(frozen=True)
class Mistake:
    """Number of `images` of `true_class` predicted as `predicted_class`, and their `share` of the true class."""

    true_class: int
    predicted_class: int
    images: int
    share: float


def read_evaluations(path: Path) -> RunEvaluations:
    """Read evaluation.json. Raises OSError, or ValueError if the content is invalid."""
    try:
        values = json.loads(read_bytes(path, MAX_EVALUATION_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(values, dict) or values.get("format") not in EVALUATION_FORMATS:
        raise ValueError("unsupported format; this gputrain reads formats 1 and 2")
    classes = values.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes) or not classes:
        raise ValueError("classes is not a list of names")
    return RunEvaluations(
        tuple(classes),
        *(_parse_evaluation(values.get(epoch_name), epoch_name, len(classes)) for epoch_name in ("last", "best")),
    )


def _parse_evaluation(values: Any, epoch_name: str, num_classes: int) -> EpochEvaluation:
    try:
        counts = _parse_counts(values["confusion"], num_classes)
        accuracies = [np.nan if share is None else share for share in values["per_class"]]
        loss = values["loss"]
        evaluation = EpochEvaluation(
            epoch=int(values["epoch"]),
            loss=None if loss is None else float(loss),
            top1=float(values["top1"]),
            top5=float(values["top5"]),
            images=int(values["images"]),
            per_class=np.array(accuracies, np.float64),
            counts=counts,
        )
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{epoch_name} is not an evaluation") from error
    if (
        evaluation.per_class.shape != (num_classes,)
        or counts.shape not in ((num_classes, num_classes), (0, 0))
        or (counts < 0).any()
    ):
        raise ValueError(f"{epoch_name} does not match {num_classes} classes")
    return evaluation


def confusion_to_json(counts: list[list[int]]) -> list[list[int]] | dict[str, list[int]]:
    """Return a confusion matrix as `evaluation.json` stores it: rows, or for many classes the counts that are not 0.

    `cells` are their places, true class x number of classes + predicted class, in ascending order.
    """
    if len(counts) <= MAX_DENSE_CLASSES:
        return counts
    flat = np.array(counts, np.int64).ravel()
    cells = np.flatnonzero(flat)
    return {"cells": cells.tolist(), "images": flat[cells].tolist()}


def _parse_counts(values: Any, num_classes: int) -> ConfusionCounts:
    """Return the matrix of `confusion_to_json`. Raises LookupError, TypeError, ValueError or OverflowError."""
    if not isinstance(values, dict):
        return np.array(values or np.zeros((0, 0)), np.int64)
    cells, images = np.array(values["cells"], np.int64), np.array(values["images"], np.int64)
    # Before the matrix takes memory: a file may have any number of class names.
    if num_classes > MAX_SPARSE_CLASSES or cells.ndim != 1 or cells.shape != images.shape or (cells < 0).any():
        raise ValueError("confusion")
    counts = np.zeros(num_classes**2, np.int64)
    counts[cells] = images
    return counts.reshape(num_classes, num_classes)


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


def worst_first(per_class: NDArray[np.float64]) -> list[int]:
    """Return class indices by ascending accuracy; classes without images come last."""
    return [int(number) for number in np.argsort(per_class, kind="stable")]


def row_shares(counts: ConfusionCounts) -> NDArray[np.float64]:
    """Normalize each row to sum 1; a row without images stays 0."""
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares
