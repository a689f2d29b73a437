"""The interface of a task, what all tasks share, and the user's own loss.

`engine.train.loop` and `engine.train.inference` call a `Task`, which `table.build_task` builds; `engine.config.tasks`
has what is known of it without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.base.errors import UsageError
from engine.base.text import list_names, pluralize
from engine.config.schema import Config
from engine.config.tasks import loss_name, task_facts
from engine.config.user_code import describe_value, is_user_code, load_user_function, user_failures
from engine.config.user_errors import UserCodeError
from engine.train.data.sources.base import Labels
from engine.train.loop.metrics import Evaluation, EvaluationAccumulator

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Maps logits (N x outputs) and targets to the mean loss, a scalar."""
Outputs = tuple[Tensor, Tensor]
"""Predictions of `Task.activate` and targets of some images."""
TaskState = dict[str, list[float]]
Activation = Literal["softmax", "sigmoid", "unscale"]
"""Logits to probabilities, or to numbers by their `mean` and `std`."""
# Probabilities that are closer than this, and numbers in standard deviations, can differ by the rounding of a library.
TIE_MARGIN = 1e-4


class Task(ABC):
    """What a model predicts for an image, and what follows from it: targets, losses, predictions and metrics.

    `classes` are the names of what the model predicts, one for each of its outputs, which are called logits for every
    task. Targets are tensors on the device, as `engine.train.data` yields them.
    """

    keeps_outputs = False
    """Whether `score` needs the predictions of all images at once."""
    state_keys: tuple[str, ...] = ()
    """Keys of `state`: what a checkpoint keeps of the task beside the weights, numbers for each output."""
    activation: Activation
    """What an exported program computes of the logits, as `activate` does."""
    example = ""
    """Code of a model card that prints the prediction of an image, `outputs`, with `classes` and `task`."""

    def __init__(
        self,
        config: Config,
        classes: Sequence[str],
        device: torch.device,
        training_labels: Callable[[], Labels],
        state: Mapping[str, Sequence[float]],
    ) -> None:
        """`training_labels` returns the targets of all training images. It may be slow. `state` is that of a
        checkpoint, empty without one."""
        self.config, self.classes, self.device = config, tuple(classes), device
        self.loss_name, self.has_accuracy = loss_name(config), "accuracy" in task_facts(config).metrics
        self._training_labels = training_labels
        self.load_state(state or self._initial_state())

    @property
    def num_outputs(self) -> int:
        """Number of logits of the model."""
        return len(self.classes)

    @cached_property
    def loss(self) -> Criterion:
        """The training loss, computed in float32 for logits of any dtype. Raises UsageError if the user's loss does not
        work."""
        return self._user_loss() if is_user_code(self.loss_name) else self._named_loss()

    @cached_property
    def validation_loss(self) -> Criterion:
        """The loss of validation and `gputrain evaluate`: one that compares runs of different losses; for a loss of the
        user that loss. Raises UsageError if the user's loss does not work."""
        return self.loss if is_user_code(self.loss_name) else self._plain_loss()

    @abstractmethod
    def _named_loss(self) -> Criterion:
        """Build the training loss of the name in the config."""

    @abstractmethod
    def _plain_loss(self) -> Criterion:
        """Build the loss of validation."""

    def scaled(self, targets: Tensor) -> Tensor:
        """Return targets as the model predicts them before `activate`."""
        return targets

    @abstractmethod
    def activate(self, logits: Tensor) -> Tensor:
        """Return the predictions of logits of any dtype: probabilities, or numbers in their own unit; N x outputs,
        float32."""

    @abstractmethod
    def predict(self, outputs: Tensor, top_k: int) -> list[list[tuple[int, float]]]:
        """Return what each image gets of the outputs of `activate`: indices and values. A task that ranks its outputs
        returns the `top_k` first."""

    @abstractmethod
    def agrees(self, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
        """Whether the outputs of another program for an image lead to the same prediction, up to rounding."""

    def describe(self, outputs: NDArray[np.float32], names: Sequence[str]) -> str:
        """Return the prediction of an image as text."""
        [prediction] = self.predict(torch.from_numpy(outputs[None]), 1)
        return ", ".join(f"{names[index]} ({value:.4f})" for index, value in prediction) or "nothing"

    @abstractmethod
    def example_targets(self, count: int) -> Tensor:
        """Return targets of images, on the CPU, for trials without data."""

    def count_correct(self, logits: Tensor, targets: Tensor) -> Tensor | None:
        """Return the number of images that are predicted right, on the device without a host sync; None if the task has
        no accuracy."""
        return None

    def accumulator(self, *, keeps_outputs: bool) -> EvaluationAccumulator:
        """Return what accumulates an evaluation. It keeps the predictions of all images if the caller or the task needs
        them."""
        activate = self.activate if keeps_outputs or self.keeps_outputs else None
        return EvaluationAccumulator(self.device, activate, has_accuracy=self.has_accuracy)

    def map_labels(self, labels: Labels, class_map: NDArray[np.int64]) -> Labels:
        """Return labels of a source with other classes, whose indices in this task are `class_map`. Raises UsageError
        if they do not have what the task needs."""
        mapped = np.zeros((len(labels), self.num_outputs), labels.dtype)
        mapped[:, class_map] = labels
        return mapped

    def score(self, evaluation: Evaluation, outputs: Outputs, *, selects: bool) -> Evaluation:
        """Return an evaluation with the metrics of the outputs of all its images, on the CPU. `selects` says whether
        they may choose something, such as thresholds: those of the validation may."""
        return evaluation

    def adopt(self, evaluation: Evaluation) -> None:
        """Take what the evaluation of an epoch has chosen, for the checkpoints that follow."""
        if evaluation.chosen:
            self.load_state(evaluation.chosen)

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take a state of the `state_keys`. Raises UsageError if it has not one number for each output."""
        for key in self.state_keys:
            if (count := len(state.get(key, ()))) != self.num_outputs:
                reason = f"has {count} of {key} for {pluralize(self.num_outputs, 'output')}"
                raise UsageError.one("checkpoint", reason, code="damaged")
        self.state = {key: list(state[key]) for key in self.state_keys}

    def _initial_state(self) -> TaskState:
        """Return the state of a new run."""
        return {}

    def loss_trials(self) -> dict[str, Tensor]:
        """Return each kind of targets that a loss gets in training, by its description."""
        return {f"targets (N x {self.num_outputs})": self.example_targets(2)}

    def _user_loss(self) -> Criterion:
        """Load the user's loss and call it with each kind of targets that training has. Raises UsageError."""
        name, run, num_outputs = self.loss_name, self.config.run, self.num_outputs
        function = load_user_function("loss.name", name, run)
        if isinstance(function, nn.Module):
            function = function.to(self.device)
            if trainable := [key for key, parameter in function.named_parameters() if parameter.requires_grad]:
                reason = f"{name} has parameters that the optimizer does not train: {list_names(trainable)}"
                advice = "move them to the model, or set requires_grad=False"
                raise UsageError.one("loss.name", reason, advice, code="not-supported")

        def criterion(logits: Tensor, targets: Tensor) -> Tensor:
            value: Any = function(logits.float(), self.scaled(targets))
            if isinstance(value, Tensor) and value.dim() == 0:
                return value
            expected = f"the mean loss of {pluralize(len(targets), 'image')}, a scalar tensor"
            raise UserCodeError(
                f"{name} returns {describe_value(value)}; it must return {expected}", code="invalid-value"
            )

        for kind, targets in self.loss_trials().items():
            what = f"{name} fails with logits (N x {num_outputs}) and {kind}"
            with user_failures("loss.name", what, run.code, run.code_packages):
                logits = torch.zeros(2, num_outputs, device=self.device, requires_grad=True)
                value = criterion(logits, targets.to(self.device))
            if not value.requires_grad:
                reason = f"{name} returns a loss without a gradient; compute it from the logits with torch alone"
                raise UsageError.one("loss.name", reason, code="invalid-value")
        return criterion
