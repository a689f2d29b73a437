"""Regression: one or several numbers for each image.

Targets are N x numbers float32. The model predicts them scaled to mean 0 and standard deviation 1 of the training
images; losses are those of scaled numbers, predictions and metrics those of the numbers in their own unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.base.errors import UsageError
from engine.base.text import list_names
from engine.train.data.sources.base import Labels
from engine.train.loop.metrics import Evaluation
from engine.train.loop.tasks.base import TIE_MARGIN, Criterion, Outputs, Task, TaskState

MAX_POINTS = 500
"""Images of an evaluation whose numbers are kept for a scatter plot."""
_LOSSES: Mapping[str, Criterion] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}


class Regression(Task):
    """One or several numbers for each image."""

    keeps_outputs = True

    state_keys = ("mean", "std")
    activation = "unscale"
    example = """\
for name, number in zip(classes, outputs):
    print(f"{name}  {number:.6g}")
"""

    def _initial_state(self) -> TaskState:
        """Return mean and standard deviation of the training images; of numbers that are all equal the latter is 1."""
        numbers = self._training_labels().astype(np.float64)
        # Rounding of the mean gives equal numbers a deviation such as 1e-17.
        std = np.where(np.ptp(numbers, 0) > 0, numbers.std(0), 1)
        return {"mean": numbers.mean(0).tolist(), "std": std.tolist()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take mean and standard deviation."""
        super().load_state(state)
        # On the device once, not in every step.
        self.mean, self.std = (torch.tensor(self.state[key], device=self.device) for key in self.state_keys)

    def _named_loss(self) -> Criterion:
        return self._plain_loss()

    def _plain_loss(self) -> Criterion:
        loss = _LOSSES[self.loss_name]
        return lambda logits, targets: loss(logits.float(), self.scaled(targets))

    def scaled(self, targets: Tensor) -> Tensor:
        """Return numbers in units of their standard deviation from their mean."""
        return (targets - self.mean) / self.std

    def activate(self, logits: Tensor) -> Tensor:
        """Return the numbers in their own unit."""
        return logits.float() * self.std + self.mean

    def predict(self, outputs: Tensor, top_k: int) -> list[list[tuple[int, float]]]:
        """Return all numbers."""
        return [list(enumerate(row)) for row in outputs.tolist()]

    def agrees(self, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
        """Whether the numbers are the same."""
        return bool((np.abs(wanted - found) <= TIE_MARGIN * np.array(self.state["std"])).all())

    def example_targets(self, count: int) -> Tensor:
        """Return numbers that differ between images, around the mean."""
        steps = torch.linspace(-1, 1, count)[:, None].repeat(1, self.num_outputs)
        return steps * self.std.cpu() + self.mean.cpu()

    def map_labels(self, labels: Labels, class_map: NDArray[np.int64]) -> Labels:
        """Return the numbers in the order of this task."""
        if len(class_map) < self.num_outputs:
            missing = [name for number, name in enumerate(self.classes) if number not in class_map]
            raise UsageError.one("data.path", f"has no numbers for {list_names(missing)}", code="bad-label")
        return super().map_labels(labels, class_map)

    def score(self, evaluation: Evaluation, outputs: Outputs, *, selects: bool) -> Evaluation:
        """Add MAE, RMSE and R² as means over the numbers; `per_class` is the MAE of each."""
        predicted, targets = (part.double().numpy() for part in outputs)
        if not len(targets):
            return evaluation
        errors = predicted - targets
        mae, squared = np.abs(errors).mean(0), (errors**2).mean(0)
        variance = targets.var(0)
        # As in scikit-learn, of numbers that are all equal: 1 if predicted exactly, else 0.
        r2 = np.where(variance > 0, 1 - squared / np.where(variance > 0, variance, 1), squared == 0)
        metrics = {"mae": float(mae.mean()), "rmse": float(np.sqrt(squared).mean()), "r2": float(r2.mean())}
        shown = np.unique(np.linspace(0, len(targets) - 1, MAX_POINTS).round().astype(np.int64))
        pairs = zip(predicted[shown].T.tolist(), targets[shown].T.tolist(), strict=True)
        points = [list(zip(*pair, strict=True)) for pair in pairs]
        details = {"rmse": np.sqrt(squared).tolist(), "r2": r2.tolist()}
        return replace(evaluation, own=metrics, per_class=mae.tolist(), details=details, points=points)
