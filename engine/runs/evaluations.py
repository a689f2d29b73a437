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

EVALUATION_FORMAT = 1
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
    if not isinstance(values, dict) or values.get("format") != EVALUATION_FORMAT:
        raise ValueError(f"unsupported format; this gputrain reads format {EVALUATION_FORMAT}")
    classes = values.get("classes")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes) or not classes:
        raise ValueError("classes is not a list of names")
    return RunEvaluations(
        tuple(classes),
        *(_parse_evaluation(values.get(epoch_name), epoch_name, len(classes)) for epoch_name in ("last", "best")),
    )


def _parse_evaluation(values: Any, epoch_name: str, num_classes: int) -> EpochEvaluation:
    try:
        counts = np.array(values["confusion"] or np.zeros((0, 0)), np.int64)
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
