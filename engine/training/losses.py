"""Loss functions of training by name, and the loss of validation.

Each maps logits (N x classes) and targets (N class labels, or N x classes probabilities) to the mean loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.config.schema import Config
from engine.config.user_code import describe_value, is_user_code, load_user_function, user_failures
from engine.config.user_errors import UserCodeError
from engine.utils.errors import UsageError
from engine.utils.text import list_names, pluralize

Criterion = Callable[[Tensor, Tensor], Tensor]


def balanced_class_weights(class_counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return class weights inversely proportional to class frequency, with mean 1 over all images.

    Same as `class_weight="balanced"` in scikit-learn if every class has images.
    """
    weights: NDArray[np.float64] = class_counts.sum() / (len(class_counts) * np.maximum(class_counts, 1))
    return weights


def build_loss(
    config: Config, num_classes: int, class_counts: Callable[[], NDArray[np.integer]], device: torch.device
) -> Criterion:
    """Build the training loss of a config, computed in float32 for logits of any dtype.

    `class_counts` returns the number of training images per class; it may be slow and is called only for balanced class
    weights. Raises UsageError if the user's loss does not work.
    """
    loss = config.loss
    if is_user_code(loss.name):
        return _user_loss(config, num_classes, device)
    weights: Tensor | None = None
    if loss.class_weights == "balanced":
        weights = torch.tensor(balanced_class_weights(class_counts()), dtype=torch.float32, device=device)
    if loss.name == "cross_entropy":
        return lambda logits, targets: _cross_entropy(logits.float(), targets, weights, loss.label_smoothing)
    elementwise = F.mse_loss if loss.name == "mse" else F.binary_cross_entropy_with_logits

    def probability_loss(logits: Tensor, targets: Tensor) -> Tensor:
        probabilities = smooth_labels(targets, num_classes, loss.label_smoothing)
        if weights is None:
            return elementwise(logits.float(), probabilities)
        losses = elementwise(logits.float(), probabilities, reduction="none").mean(1)
        # Not a matrix product, which autocast would compute in half precision.
        return (losses * (probabilities * weights).sum(1)).mean()

    return probability_loss


def guessing_loss(config: Config, num_classes: int) -> float | None:
    """Return the mean training loss of equal probabilities for all classes; None if unknown.

    Soft targets of mixup, cutmix and label smoothing give 1/N for each class in the mean, as labels do. Only the
    squared error depends on how they are spread.
    """
    share, loss = 1 / num_classes, config.loss
    if loss.name == "cross_entropy":
        return math.log(num_classes)
    if loss.name == "bce" and num_classes > 1:
        return -share * math.log(share) - (1 - share) * math.log(1 - share)
    if loss.name == "mse" and not (config.augment.mixup or config.augment.cutmix):
        return (1 - loss.label_smoothing) ** 2 * share * (1 - share)
    return None


def build_validation_loss(
    config: Config, num_classes: int, device: torch.device, training_loss: Criterion | None = None
) -> Criterion:
    """Build the loss of validation and `gputrain evaluate`: plain cross-entropy as in timm's train.py, which compares
    runs of different losses, label smoothing and class weights; for a loss of the user that loss.

    `training_loss` is the loss of `build_loss`, if it is built. Raises UsageError if the user's loss does not work."""
    if is_user_code(config.loss.name):
        return training_loss or _user_loss(config, num_classes, device)
    return lambda logits, targets: F.cross_entropy(logits.float(), targets)


def _cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None, smoothing: float) -> Tensor:
    if weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
    # reduction="mean" divides by the sum of the batch's weights, which differs from rank to rank.
    return F.cross_entropy(logits, targets, weights, reduction="none", label_smoothing=smoothing).mean()


def smooth_labels(targets: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Return targets as N x classes probabilities, with `smoothing` spread evenly over all classes."""
    probabilities = targets if targets.is_floating_point() else F.one_hot(targets, num_classes).float()
    return probabilities * (1 - smoothing) + smoothing / num_classes


def _user_loss(config: Config, num_classes: int, device: torch.device) -> Criterion:
    """Load the user's loss and call it with each kind of targets that training has. Raises UsageError."""
    name, run = config.loss.name, config.run
    function = load_user_function("loss.name", name, run)
    if isinstance(function, nn.Module):
        function = function.to(device)
        if trainable := [key for key, parameter in function.named_parameters() if parameter.requires_grad]:
            reason = f"{name} has parameters that the optimizer does not train: {list_names(trainable)}"
            advice = "move them to the model, or set requires_grad=False"
            raise UsageError.one("loss.name", reason, advice, code="not-supported")

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        value: Any = function(logits.float(), targets)
        if isinstance(value, Tensor) and value.dim() == 0:
            return value
        expected = f"the mean loss of {pluralize(len(targets), 'image')}, a scalar tensor"
        raise UserCodeError(f"{name} returns {describe_value(value)}; it must return {expected}", code="invalid-value")

    labels = torch.arange(2, device=device) % num_classes
    trials = {"labels (N)": labels}
    if config.augment.mixup > 0 or config.augment.cutmix > 0:
        trials[f"class probabilities (N x {num_classes}) of mixup and CutMix"] = smooth_labels(labels, num_classes, 0.1)
    for kind, targets in trials.items():
        what = f"{name} fails with logits (N x {num_classes}) and {kind}"
        with user_failures("loss.name", what, run.code, run.code_packages):
            value = criterion(torch.zeros(2, num_classes, device=device, requires_grad=True), targets)
        if not value.requires_grad:
            reason = f"{name} returns a loss without a gradient; compute it from the logits with torch alone"
            raise UsageError.one("loss.name", reason, code="invalid-value")
    return criterion
