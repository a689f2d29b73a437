"""The content of model.json, which describes an export to other programs.

`engine.train.inference.export` makes, writes and reads it, `engine.train.inference.model_card` shows the same in the
README.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from engine.base.codec import ENTRIES, Count, FileRecord, Finite, Meta, Number, Record, field
from engine.config.monitor import DEFAULT_MONITOR
from engine.config.task_section import TaskName

ExportFormat = Literal["safetensors", "torch-export", "onnx"]
Share = Annotated[float, Meta(ge=0, le=1)]


class Architecture(Record, frozen=True, kw_only=True):
    """The config keys that name the network."""

    source: str
    name: str
    options: dict[str, Any]


class InputImage(Record, frozen=True, kw_only=True):
    """The size and the channels of the images, and the mean and the standard deviation of each channel."""

    size: Count
    channels: Count
    mean: tuple[Number, ...]
    std: tuple[Number, ...]


class TensorDescription(Record, frozen=True, kw_only=True):
    """The input or output of a file. In `shape`, a text stands for a dimension of any size."""

    name: str
    dtype: str
    shape: tuple[str | Count, ...]


class StoredProof(Record, frozen=True, kw_only=True):
    """How a file agrees with `gputrain predict`, see `engine.train.inference.export_proof.Proof`."""

    passed: bool
    images: Count
    same_class: Count
    max_difference: Finite | None


class ExportedFile(Record, frozen=True, kw_only=True):
    """One file of the model: its input, its output, its SHA-256 and its proof."""

    format: ExportFormat
    input: TensorDescription
    output: TensorDescription
    sha256: str
    proof: StoredProof


class ExportedTask(Record, frozen=True, kw_only=True):
    """The task, with the `thresholds` from which on labels are predicted, or `mean` and `std` of its numbers.

    Each has one number for each of the classes, or none. A number is a logit x std + mean.
    """

    name: TaskName = "classification"
    thresholds: tuple[Number, ...] = ()
    mean: tuple[Number, ...] = ()
    std: tuple[Number, ...] = ()


class ModelDescription(FileRecord, frozen=True, kw_only=True):
    """Content of model.json.

    `epoch` is null for a checkpoint within an epoch, `val_accuracy` and `monitor_value`, that of the metric of
    `run.monitor`, if it is not known. `val_metrics` are others of the validation. `classes` are the names of classes,
    labels or numbers, and `output` is how they follow from the logits.
    """

    gputrain: str
    run: str
    checkpoint: str
    step: Count
    epoch: Count | None
    val_accuracy: Share | None
    val_metrics: Annotated[dict[str, Finite | None], ENTRIES] = field(default_factory=dict)
    monitor: str = DEFAULT_MONITOR
    monitor_value: Finite | None = None
    ema: bool
    weights_sha256: str
    model: Architecture
    classes: Annotated[tuple[str, ...], ENTRIES]
    image: InputImage
    tta: Literal["none", "flip"]
    task: ExportedTask = field(default_factory=ExportedTask)
    output: Literal["softmax", "sigmoid", "unscale"]
    files: Annotated[dict[str, ExportedFile], ENTRIES] = field(default_factory=dict)
