"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine.config.schema import Config
from engine.config.task_section import TaskName
from engine.train.data.sources.base import Labels
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.classification import Classification
from engine.train.loop.tasks.multilabel import Multilabel
from engine.train.loop.tasks.regression import Regression

TASKS: Mapping[TaskName, type[Task]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
}


def build_task(
    config: Config,
    classes: Sequence[str],
    device: torch.device,
    training_labels: Callable[[], Labels] | None = None,
    state: Mapping[str, Sequence[float]] | None = None,
) -> Task:
    """Build the task of a config from the training images or from the `state` in a checkpoint, see `Task`.

    Raises UsageError if the state does not match the classes."""

    def unknown() -> Labels:
        raise ValueError("the task needs training labels")

    return TASKS[config.task.name](config, classes, device, training_labels or unknown, state or {})
