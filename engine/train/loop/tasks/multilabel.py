"""Multi-label classification: any number of labels for each image.

Targets are N x labels float32, 1 for each label of an image and 0 for the others, with mixup and CutMix between them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.config.training_sections import LossConfig
from engine.train.loop.metrics import Evaluation
from engine.train.loop.tasks.base import TIE_MARGIN, Criterion, Outputs, Task, TaskState

# Defaults of Ben-Baruch et al., "Asymmetric Loss For Multi-Label Classification", 2021, and of timm.
ASL_GAMMA_POSITIVE, ASL_GAMMA_NEGATIVE, ASL_CLIP = 1.0, 4.0, 0.05
ASL_EPSILON = 1e-8
DEFAULT_THRESHOLD = 0.5


class Multilabel(Task):
    """Any number of labels for each image; a label counts as predicted from its threshold on."""

    keeps_outputs = True

    state_keys = ("thresholds",)
    activation = "sigmoid"
    example = """\
for name, probability, threshold in zip(classes, outputs, task["thresholds"]):
    if probability >= threshold:
        print(f"{probability:.4f}  {name}")
"""

    def _initial_state(self) -> TaskState:
        return {"thresholds": [DEFAULT_THRESHOLD] * self.num_outputs}

    def _named_loss(self) -> Criterion:
        if self.loss_name == "asl":
            return asymmetric_loss
        weight: Tensor | None = None
        if self.config.loss.class_weights == "balanced":
            labels = self._training_labels()
            # A label of all images or of none counts as if one image were different, so that its weight is not 0.
            positive = labels.sum(0).clip(1, max(len(labels) - 1, 1)) / max(len(labels), 2)
            weight = torch.tensor((1 - positive) / positive, dtype=torch.float32, device=self.device)
        if self.loss_name == "focal":
            return partial(_focal_loss, self.config.loss, weight)
        return lambda logits, targets: F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weight)

    def _plain_loss(self) -> Criterion:
        return lambda logits, targets: F.binary_cross_entropy_with_logits(logits.float(), targets)

    def activate(self, logits: Tensor) -> Tensor:
        """Return the probability of each label."""
        return logits.float().sigmoid()

    def predict(self, outputs: Tensor, top_k: int) -> list[list[tuple[int, float]]]:
        """Return the labels from their thresholds on with their probabilities, most likely first."""
        rows = outputs.cpu().numpy()
        is_predicted = rows >= self.float_thresholds()
        return [
            sorted(((index, float(row[index])) for index in np.flatnonzero(chosen).tolist()), key=lambda pair: -pair[1])
            for row, chosen in zip(rows, is_predicted, strict=True)
        ]

    def agrees(self, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
        """Whether the labels are the same, except for those as likely as their threshold."""
        thresholds = self.float_thresholds()
        is_tie = np.abs(wanted - thresholds) <= TIE_MARGIN
        return bool((((wanted >= thresholds) == (found >= thresholds)) | is_tie).all())

    def float_thresholds(self) -> NDArray[np.float32]:
        """Return the thresholds in the float32 of the probabilities, as a program that is exported compares them."""
        return np.array(self.state["thresholds"], np.float32)

    def example_targets(self, count: int) -> Tensor:
        """Return targets in which each image has every second label, the first image from the second label on."""
        return ((torch.arange(count)[:, None] + torch.arange(self.num_outputs)) % 2).float()

    def score(self, evaluation: Evaluation, outputs: Outputs, *, selects: bool) -> Evaluation:
        """Add mAP, and F1 at thresholds that the validation chooses for each label; `per_class` is the AP."""
        probabilities, labels = outputs[0].double().numpy(), outputs[1].numpy() > 0.5
        curves = [_PrecisionRecall(*column) for column in zip(probabilities.T, labels.T, strict=True)]
        thresholds = [curve.best_threshold() for curve in curves] if selects else self.state["thresholds"]
        # In the float32 of the probabilities, as a program that is exported compares them.
        predicted = outputs[0].numpy() >= np.array(thresholds, np.float32)
        correct, total = (predicted & labels).sum(0), predicted.sum(0) + labels.sum(0)
        per_class = [curve.average_precision() for curve in curves]
        known = [precision for precision in per_class if precision is not None]
        metrics = {
            "mAP": float(np.mean(known)) if known else float("nan"),
            # As in scikit-learn, the F1 of a label is 0 if no image has it and none is predicted to have it.
            "macro_f1": float(np.mean(2 * correct / np.maximum(total, 1))),
            "micro_f1": float(2 * correct.sum() / max(total.sum(), 1)),
        }
        details = {
            "F1": (2 * correct / np.maximum(total, 1)).tolist(),
            "threshold": [float(threshold) for threshold in thresholds],
            "images": labels.sum(0).tolist(),
        }
        chosen = {"thresholds": thresholds}
        return replace(evaluation, own=metrics, per_class=per_class, chosen=chosen, details=details)


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the asymmetric loss as timm does: the sum over the labels, as a mean over the images."""
    positive = logits.float().sigmoid()
    negative = (1 - positive + ASL_CLIP).clamp(max=1)
    loss = targets * positive.clamp(min=ASL_EPSILON).log() + (1 - targets) * negative.clamp(min=ASL_EPSILON).log()
    certainty = positive * targets + negative * (1 - targets)
    focus = (1 - certainty) ** (ASL_GAMMA_POSITIVE * targets + ASL_GAMMA_NEGATIVE * (1 - targets))
    return -(loss * focus).sum() / len(targets)


def _focal_loss(config: LossConfig, weight: Tensor | None, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of torchvision's focal loss, with `weight` as the pos_weight of each label."""
    from torchvision.ops import sigmoid_focal_loss

    losses: Tensor = sigmoid_focal_loss(logits.float(), targets, config.focal_alpha, config.focal_gamma)
    return (losses if weight is None else losses * (1 + (weight - 1) * targets)).mean()


class _PrecisionRecall:
    """Precision and recall of one label at each of its distinct scores, from the highest score down."""

    def __init__(self, scores: np.ndarray, labels: np.ndarray) -> None:
        order = np.argsort(-scores, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True)) if len(order) else np.empty(0, np.int64)
        self.scores, self.correct = scores[order][ends], np.cumsum(labels[order])[ends]
        self.predicted, self.positive = ends + 1, int(labels.sum())

    def average_precision(self) -> float | None:
        """Return the average precision as scikit-learn does, without interpolation; None without an image of the
        label."""
        if not self.positive:
            return None
        steps = np.diff(self.correct, prepend=0) / self.positive
        return float(np.sum(steps * self.correct / self.predicted))

    def best_threshold(self) -> float:
        """Return the threshold with the highest F1, the highest of equal ones; 0.5 without an image of the label.

        It is midway between two scores: another batch size or device rounds the same score differently.
        """
        if not self.positive:
            return DEFAULT_THRESHOLD
        best = np.argmax(2 * self.correct / (self.predicted + self.positive))
        score, lower = np.append(self.scores, 0.0)[best : best + 2]
        middle = (score + lower) / 2
        return float(middle if np.float32(middle) > lower else score)
