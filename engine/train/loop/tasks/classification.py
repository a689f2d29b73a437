"""Classification: one class for each image.

Targets are class indices (N int64), with mixup and CutMix class probabilities (N x classes).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.train.data.sources.base import Labels
from engine.train.loop.metrics import ClassAccumulator
from engine.train.loop.tasks.base import TIE_MARGIN, Activation, Criterion, Task


class Classification(Task):
    """One class for each image."""

    example = """\
for index in outputs.argsort()[::-1][:5]:
    print(f"{outputs[index]:.4f}  {classes[index]}")
"""

    @property
    def activation(self) -> Activation:  # type: ignore[override]
        """Softmax, or sigmoid with loss bce, whose probabilities do not sum to 1."""
        return "sigmoid" if self.loss_name == "bce" else "softmax"

    def _named_loss(self) -> Criterion:
        loss, num_classes = self.config.loss, self.num_outputs
        weights: Tensor | None = None
        if loss.class_weights == "balanced":
            counts = np.bincount(self._training_labels(), minlength=num_classes)
            weights = torch.tensor(balanced_class_weights(counts), dtype=torch.float32, device=self.device)
        if self.loss_name == "cross_entropy":
            return lambda logits, targets: _cross_entropy(logits.float(), targets, weights, loss.label_smoothing)
        if self.loss_name == "focal":

            def focal_loss(logits: Tensor, targets: Tensor) -> Tensor:
                probabilities = smooth_labels(targets, num_classes, loss.label_smoothing)
                weighted = probabilities if weights is None else probabilities * weights
                return softmax_focal_loss(logits.float(), weighted, loss.focal_gamma)

            return focal_loss
        elementwise = F.mse_loss if self.loss_name == "mse" else F.binary_cross_entropy_with_logits

        def probability_loss(logits: Tensor, targets: Tensor) -> Tensor:
            probabilities = smooth_labels(targets, num_classes, loss.label_smoothing)
            if weights is None:
                return elementwise(logits.float(), probabilities)
            losses = elementwise(logits.float(), probabilities, reduction="none").mean(1)
            # Not a matrix product, which autocast would compute in half precision.
            return (losses * (probabilities * weights).sum(1)).mean()

        return probability_loss

    def _plain_loss(self) -> Criterion:
        # As in timm's train.py, which compares runs of different losses, label smoothing and class weights.
        return lambda logits, targets: F.cross_entropy(logits.float(), targets)

    def activate(self, logits: Tensor) -> Tensor:
        """Return the probability of each class."""
        logits = logits.float()
        return logits.sigmoid() if self.activation == "sigmoid" else logits.softmax(1)

    def predict(self, outputs: Tensor, top_k: int) -> list[list[tuple[int, float]]]:
        """Return the most probable classes with their probabilities, most likely first."""
        best = outputs.topk(min(top_k, outputs.shape[1]), 1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [list(zip(indices, values, strict=True)) for indices, values in pairs]

    def agrees(self, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
        """Whether the class is the same, or one that is as likely."""
        return bool(wanted.max() - wanted[found.argmax()] <= TIE_MARGIN)

    def example_targets(self, count: int) -> Tensor:
        """Return the class 0, 1, 2 and so on of each image, from 0 again behind the last class."""
        return torch.arange(count) % self.num_outputs

    def loss_trials(self) -> dict[str, Tensor]:
        """Return labels, and class probabilities if the batches are mixed."""
        labels = self.example_targets(2)
        trials = {"labels (N)": labels}
        if self.config.augment.mixup > 0 or self.config.augment.cutmix > 0:
            kind = f"class probabilities (N x {self.num_outputs}) of mixup and CutMix"
            trials[kind] = smooth_labels(labels, self.num_outputs, 0.1)
        return trials

    def count_correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the number of images whose class is right."""
        return (logits.argmax(1) == targets).sum()

    def map_labels(self, labels: Labels, class_map: NDArray[np.int64]) -> Labels:
        """Return the class of each image in this task."""
        mapped: Labels = class_map[labels]
        return mapped

    def accumulator(self, *, keeps_outputs: bool) -> ClassAccumulator:
        """Return what counts the images of each class and its predictions."""
        return ClassAccumulator(self.device, self.num_outputs, self.activate if keeps_outputs else None)


def balanced_class_weights(class_counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return class weights inversely proportional to class frequency, with mean 1 over all images.

    Same as `class_weight="balanced"` in scikit-learn if every class has images.
    """
    weights: NDArray[np.float64] = class_counts.sum() / (len(class_counts) * np.maximum(class_counts, 1))
    return weights


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
    # reduction="mean" divides by the sum of the batch's weights, which differs from rank to rank.
    return F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=smoothing).mean()


def softmax_focal_loss(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Return the mean focal loss of class probabilities, N x classes, which may be weighted.

    It is the cross-entropy of each class times (1 - p)^gamma (Lin et al., "Focal Loss for Dense Object Detection",
    2017).
    """
    log_probabilities = logits.log_softmax(1)
    return -(targets * (1 - log_probabilities.exp()) ** gamma * log_probabilities).sum(1).mean()


def smooth_labels(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return targets as N x classes probabilities, with `smoothing` spread evenly over all classes."""
    probabilities = targets if targets.is_floating_point() else F.one_hot(targets, num_classes).float()
    return probabilities * (1 - smoothing) + smoothing / num_classes
