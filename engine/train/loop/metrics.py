"""Metrics of training and evaluation: loss, accuracy, top-5 accuracy and confusion matrix, summed on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from engine.base.codec import finite
from engine.config.tasks import CLASS_METRICS
from engine.runs.evaluations import StoredEvaluation, to_confusion
from engine.runs.metrics import Metric
from engine.runs.records import Scores
from engine.train.distributed.collectives import all_reduce

# A larger confusion matrix is unreadable and fills the disk.
MAX_CONFUSION_CLASSES = 1000


@dataclass(frozen=True)
class Metrics:
    """Metrics over all ranks: mean loss (NaN without images), accuracy (None if the task has none), unreadable images,
    and images counted."""

    loss: float
    accuracy: float | None
    unread: int
    images: int = 0


class MetricAccumulator:
    """Running sums of one rank, kept on its device to avoid host syncs.

    `counts` are the correctly classified images, all images, and the unreadable images.
    """

    def __init__(self, device: torch.device, has_accuracy: bool = True) -> None:
        self._has_accuracy = has_accuracy
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._correct, self._num_images, _ = self.counts

    def add(self, mean_loss: Tensor, correct: Tensor | None, num_images: int, nonfinite: Tensor | None = None) -> None:
        """Add a batch, unless `nonfinite` (a bool on the device) is true, without a host sync."""
        if nonfinite is None:
            self._num_images.add_(num_images)
        else:
            mean_loss = torch.where(nonfinite, 0.0, mean_loss)
            correct = None if correct is None else torch.where(nonfinite, 0, correct)
            self._num_images.add_(torch.where(nonfinite, 0, num_images))
        # The product is computed in the float64 of the sum.
        self.loss_sum.add_(mean_loss, alpha=num_images)
        if correct is not None:
            self._correct.add_(correct)

    def all_reduce(self) -> Metrics:
        """Return the metrics of all ranks. A collective and a host sync."""
        loss_sum, counts = self.loss_sum.clone(), self.counts.clone()
        all_reduce(loss_sum)
        all_reduce(counts)
        correct, images, unread = counts.tolist()
        accuracy = correct / max(images, 1) if self._has_accuracy else None
        return Metrics(loss_sum.item() / images if images else math.nan, accuracy, unread, images)


class EvaluationAccumulator:
    """Accumulates the evaluation of one model on its device: the loss, and the outputs if they are needed."""

    def __init__(
        self, device: torch.device, activate: Callable[[Tensor], Tensor] | None = None, *, has_accuracy: bool = True
    ) -> None:
        """With `activate`, keep the predictions of each batch, which it returns, and its targets in `outputs`."""
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self._activate = activate
        self.totals = MetricAccumulator(device, has_accuracy)

    def add(self, mean_loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a batch without a host sync."""
        self._count(mean_loss, logits, targets)
        if self._activate is not None:
            self.outputs.append((self._activate(logits), targets))

    def _count(self, mean_loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.totals.add(mean_loss, None, len(targets))

    def all_reduce(self) -> Evaluation:
        """Return the evaluation over all ranks, or of this process if it is alone. A collective."""
        return Evaluation(self.totals.all_reduce(), None, [], [])


class ClassAccumulator(EvaluationAccumulator):
    """Accumulates also accuracy, top-5 accuracy and the confusion matrix of classes."""

    def __init__(
        self, device: torch.device, num_classes: int, activate: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(device, activate)
        self._num_classes = num_classes
        self._top5_correct = torch.zeros((), dtype=torch.int64, device=device)
        # Class x predicted class; with too many classes only class x (wrong, correct, predicted).
        self._full_matrix = num_classes <= MAX_CONFUSION_CLASSES
        self._num_columns = num_classes if self._full_matrix else 3
        self._confusion_counts = torch.zeros(num_classes * self._num_columns, dtype=torch.int64, device=device)

    def _count(self, mean_loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        predicted = logits.argmax(1)
        correct = predicted == targets
        self.totals.add(mean_loss, correct.sum(), len(targets))
        top5 = logits.topk(min(5, self._num_classes), 1).indices
        # The label is among the top 5 at most once, so the sum counts images.
        self._top5_correct += (top5 == targets[:, None]).sum()
        cells = targets * self._num_columns + (predicted if self._full_matrix else correct)
        ones = torch.ones_like(cells)
        self._confusion_counts.index_add_(0, cells, ones)
        if not self._full_matrix:
            self._confusion_counts.index_add_(0, predicted * self._num_columns + 2, ones)

    def all_reduce(self) -> Evaluation:
        """Return the evaluation over all ranks, or of this process if it is alone. A collective."""
        metrics = self.totals.all_reduce()
        top5_correct, confusion_counts = self._top5_correct.clone(), self._confusion_counts.clone()
        all_reduce(top5_correct)
        all_reduce(confusion_counts)
        top5 = top5_correct.item() / max(metrics.images, 1)
        if dist.is_initialized() and dist.get_rank() != 0:
            return Evaluation(metrics, top5, [], [])
        table = confusion_counts.view(self._num_classes, -1).cpu()
        if self._full_matrix:
            correct, images, predicted = table.diagonal(), table.sum(1), table.sum(0)
        else:
            correct, images, predicted = table[:, 1], table[:, :2].sum(1), table[:, 2]
        class_counts = zip(correct.tolist(), images.tolist(), strict=True)
        return Evaluation(
            metrics,
            top5,
            [class_correct / images if images else None for class_correct, images in class_counts],
            table.tolist() if self._full_matrix else [],
            class_means(correct, images, predicted),
        )


def class_means(correct: Tensor, images: Tensor, predicted: Tensor) -> dict[str, float]:
    """Return `CLASS_METRICS` of the correctly classified images, all images and predictions of each class; NaN without
    images.

    As in scikit-learn, the macro averages are over the classes that have an image or a prediction, with 0 for 0/0, and
    the balanced accuracy over those that have an image.
    """
    occurs, correct = images + predicted > 0, correct.double()
    recall, precision = correct / images.clamp(min=1), correct / predicted.clamp(min=1)
    f1 = 2 * correct / (images + predicted).clamp(min=1)
    means = (f1[occurs], precision[occurs], recall[occurs], recall[images > 0])
    return {name: values.mean().item() for name, values in zip(CLASS_METRICS, means, strict=True)}


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    `per_class` is the accuracy of each class, None without images, or what the task has in its place.
    `confusion[i][j]` counts images of class i predicted as class j; empty for more than MAX_CONFUSION_CLASSES.
    `class_means` has all `CLASS_METRICS`, and `own` the metrics that the run records: those, others of the task, and
    the user's own. `details` has more metrics of each output by name, `points` for each number the predicted and the
    true ones of some images. `chosen` is what the validation has chosen, see `Task.adopt`. All are empty on ranks other
    than 0: a million counts of 1000 classes take 14 ms to become Python integers.
    """

    metrics: Metrics
    top5: float | None
    per_class: list[float | None]
    confusion: list[list[int]]
    class_means: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, list[float]] = field(default_factory=dict)
    points: list[list[tuple[float, float]]] = field(default_factory=list)

    def scores(self) -> Scores:
        """Return what the journal records of it."""
        own = {name: finite(value) for name, value in self.own.items()}
        loss, accuracy = finite(self.metrics.loss), self.metrics.accuracy
        return Scores(loss=loss, accuracy=accuracy, top5=self.top5, metrics=own)

    def to_stored(self, epoch: int) -> StoredEvaluation:
        """Return what `evaluation.json` says of the evaluation."""
        return StoredEvaluation(
            epoch=epoch,
            loss=finite(self.metrics.loss),
            top1=self.metrics.accuracy,
            top5=self.top5,
            images=self.metrics.images,
            per_class=tuple(self.per_class),
            confusion=to_confusion(self.confusion),
            metrics={name: finite(value) for name, value in self.own.items()},
            thresholds=tuple(self.chosen.get("thresholds", ())),
            details={name: tuple(map(finite, values)) for name, values in self.details.items()},
            points=tuple(tuple((finite(a), finite(b)) for a, b in pairs) for pairs in self.points),
        )


@dataclass
class BestSoFar:
    """The epoch whose evaluation ranks first by the `monitor` of the run; 0 without one.

    `value` is that of the monitor, and `loss` the validation loss.
    """

    monitor: Metric
    epoch: int = 0
    value: float = -1.0
    loss: float | None = None

    def update(self, epoch: int, value: float | None, val_loss: float) -> bool:
        """Add the evaluation of an epoch; return whether it is the best so far."""
        rank, loss = self.monitor.rank, finite(val_loss)
        if value is None or (self.epoch and rank(value, loss, epoch) <= rank(self.value, self.loss, self.epoch)):
            return False
        self.epoch, self.value, self.loss = epoch, value, loss
        return True
