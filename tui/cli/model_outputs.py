"""What `--json` prints of datasets, models, their results and their speed: records as in `tui.cli.outputs`."""

from __future__ import annotations

from typing import Any

from engine.utils.codec import Count, Finite, Integer
from tui.cli.outputs import Output, Values


class DataOutput(Output, frozen=True, kw_only=True):
    """`gputrain data --json`"""

    dataset: str
    """Name of the dataset."""
    path: str | None
    """Its folder or file."""
    classes: list[Values]
    """Each class: `name`, and the numbers of `train` and `val` images, and of `test` images if there are any."""
    files: Values | None
    """Sizes and kinds of the image files; null if there are none."""
    input: Values
    """Size and resize of the input of the model."""
    skipped: list[str]
    """Files that are no readable images, and folders that are not used, each with the reason."""


class PackPlanOutput(Output, frozen=True, kw_only=True):
    """`gputrain data pack --dry-run --json`"""

    output: str
    """Folder of the shards."""
    images: Count
    """Number of images."""
    expected_bytes: Count
    """Expected size."""


class PackOutput(Output, frozen=True, kw_only=True):
    """`gputrain data pack --json`"""

    output: str
    """Folder of the shards."""
    images: dict[str, Count]
    """Number of images in `train` and in `val`."""
    classes: Count
    """Number of classes."""
    size_bytes: Count
    """Size of the shards."""
    source_bytes: Count
    """Size of the image files."""
    skipped: tuple[str, ...]
    """Files that are no readable images."""


class ModelsOutput(Output, frozen=True, kw_only=True):
    """`gputrain models --json`"""

    models: list[Values]
    """Each model: its name, source, weights and number of parameters."""


class ModelOutput(Output, frozen=True, kw_only=True):
    """`gputrain models show --json`"""

    model: str
    """Name of the model."""
    images: tuple[Integer, ...]
    """Shape of the input."""
    classes: Count
    """Number of classes."""
    parameters: Count
    """Number of parameters."""
    trainable: Count
    """Number of parameters that receive gradients."""
    buffers: Count
    """Number of elements in buffers."""
    weight_bytes: Count
    """Size of parameters and buffers."""
    multiply_adds: Count
    """Multiply-adds of a forward pass."""
    activation_bytes: Count
    """Size of the outputs of all leaf layers."""
    saved_bytes: Count
    """What autograd keeps for the backward pass."""
    layers: list[Values]
    """Each layer in order of definition, the whole model first."""
    features: list[Values]
    """Layers whose outputs are feature maps."""
    groups: list[Values]
    """Parameter groups of the optimizer."""
    input: str
    """Size and resize of the input in training and evaluation, as text."""


class EvaluationOutput(Output, frozen=True, kw_only=True):
    """`gputrain evaluate --json`"""

    run: str
    """Name of the run."""
    checkpoint: str
    """Path of the checkpoint."""
    dataset: str
    """Name of the dataset."""
    path: str | None
    """Its folder or file."""
    split: str
    """Images that were evaluated: train, val or all."""
    tta: str
    """Test-time augmentation."""
    input: Values
    """Resize, crop and interpolation."""
    images: Count
    """Number of images."""
    unread: Count
    """Number of images that could not be read."""
    loss: Finite | None
    """Loss."""
    top1: Finite | None
    """Accuracy, 0 to 1."""
    top5: Finite | None
    """Top-5 accuracy, 0 to 1."""
    classes: list[Values]
    """Each class: `name`, `images` and `accuracy`."""
    confusion: Any
    """Counts by true and predicted class."""
    metrics: dict[str, Finite | None]
    """The user's own metrics by name."""


class InspectionOutput(Output, frozen=True, kw_only=True):
    """`gputrain evaluate --list LIST --json`"""

    run: str
    """Name of the run."""
    checkpoint: str
    """Name of the checkpoint."""
    step: Count
    """Step of the checkpoint."""
    epoch: Count | None
    """Its epoch; null if unknown."""
    dataset: str
    """Name of the dataset."""
    folder: str | None
    """Folder of the images; null if they are no files."""
    split: str
    """Images that were evaluated: train, val or all."""
    images: Count
    """Number of images."""
    wrong: Count
    """Number of images that are classified wrongly."""
    unread: Count
    """Number of images that could not be read."""
    classes: list[str]
    """Names of the classes."""
    lists: dict[str, list[Values]]
    """Name of a list to its images, with `path`, `label`, `predicted`, `probability` and `loss`."""


class ExportOutput(Output, frozen=True, kw_only=True):
    """`gputrain export --json`"""

    run: str
    """Name of the run."""
    checkpoint: str
    """Path of the checkpoint."""
    files: list[str]
    """Paths that were written."""
    proof: Any
    """How the export was compared with `gputrain predict`, `Proof` in `engine/inference/export_proof.py`."""


class BenchOutput(Output, frozen=True, kw_only=True):
    """`gputrain bench --json`"""

    model: str
    """Name of the model."""
    dataset: str
    """Name of the dataset."""
    device: str
    """gpu or cpu."""
    scaling: str
    """weak or strong."""
    epochs: Count
    """Epochs of each run."""
    repeats: Count
    """Runs for each number of ranks."""
    synthetic_data: bool
    """Whether runs that repeat one batch were measured, too."""
    speeds: list[Values]
    """Results for each number of ranks, `ScalingResult` in `engine/bench/report.py`."""
    runs: list[Values]
    """Each run, `BenchRun` in `engine/bench/report.py`."""
