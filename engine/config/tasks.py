"""What config rules, lists and screens know of each task, without torch: its losses, its metrics, and its limits.

`engine.train.loop.tasks` has what a task computes. A row here and a class there are a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.config.task_section import TaskName

Mode = Literal["max", "min"]
"""Whether the maximum or the minimum of a metric is best."""
CLASS_METRICS = ("macro_f1", "macro_precision", "macro_recall", "balanced_accuracy")
"""Means over the classes, as scikit-learn defines them. A run records them if its config names them."""


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task without torch.

    `losses` are the names that `loss.name` may have; the first is the default. `metrics` are those of an evaluation
    beside the loss, and `monitor` the one that selects the best epoch by default. `refused` maps keys that cannot be
    set to the reason, and `unused` are keys without effect. `sgd_lr` is the default of `optim.lr` for sgd, if the task
    has its own.

    The others are words for tables and sentences. `model` is what a model is called, `outputs` its outputs, `predicted`
    those that an image gets, `value` the number of each, and `per_output` the metric of each. `ranked` says whether an
    image gets one output, the most probable.
    """

    losses: tuple[str, ...]
    metrics: Mapping[str, Mode]
    monitor: str
    model: str
    outputs: str
    predicted: str
    value: str
    per_output: str
    ranked: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    sgd_lr: float | None = None


TASK_FACTS: Mapping[TaskName, TaskFacts] = {
    "classification": TaskFacts(
        losses=("cross_entropy", "mse", "bce", "focal"),
        metrics={"accuracy": "max", "top5": "max", **dict.fromkeys(CLASS_METRICS, "max")},
        monitor="accuracy",
        model="Image classifier",
        outputs="classes",
        predicted="class",
        value="probability",
        per_output="accuracy",
        ranked=True,
        unused=("loss.focal_alpha",),
    ),
    "multilabel": TaskFacts(
        losses=("bce", "asl", "focal"),
        metrics={"mAP": "max", "macro_f1": "max", "micro_f1": "max"},
        monitor="mAP",
        refused={"data.sampler": "balanced needs one class for each image, which task multilabel does not have"},
        model="Multi-label image classifier",
        outputs="labels",
        predicted="labels",
        value="probability",
        per_output="AP",
        unused=("loss.label_smoothing",),
    ),
    "regression": TaskFacts(
        losses=("mse", "l1", "huber"),
        metrics={"mae": "min", "rmse": "min", "r2": "max"},
        monitor="mae",
        refused={
            "augment.cutmix": "has no meaning for the numbers of task regression; use augment.mixup",
            "data.sampler": "balanced needs one class for each image, which task regression does not have",
        },
        model="Image regression model",
        outputs="numbers",
        predicted="numbers",
        value="value",
        per_output="mae",
        unused=("loss.label_smoothing", "loss.class_weights"),
        # The gradient of a squared error grows with the error. With momentum 0.9 and features of the squared norm
        # `MAX_FEATURE_NORM_SQUARED`, steps diverge from a learning rate of 2 (1 + 0.9) / (2 (256 + 1)) = 0.0074 on.
        sgd_lr=0.005,
    ),
}


def per_output_mode(facts: TaskFacts) -> Mode:
    """Return whether the maximum or the minimum of the metric of each output is best."""
    return facts.metrics.get(facts.per_output, "max")


def task_facts(config: Config) -> TaskFacts:
    """Return what is known of the task of a config."""
    return TASK_FACTS[config.task.name]


def stored_task_facts(values: Mapping[str, object]) -> TaskFacts:
    """Return the facts about the task that stored config values name. The values are by `section.key`.

    Values that name no known task are of a classification."""
    name = values.get("task.name")
    return next((facts for task, facts in TASK_FACTS.items() if task == name), TASK_FACTS["classification"])


def loss_name(config: Config) -> str:
    """Return the name of the training loss."""
    return task_facts(config).losses[0] if config.loss.name == "auto" else config.loss.name
