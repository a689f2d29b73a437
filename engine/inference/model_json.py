"""The content of model.json, which describes an export to other programs.

`engine.inference.export_description` makes it, `engine.inference.export` writes and reads it,
`engine.inference.model_card` shows the same in the README.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from engine.utils.codec import ENTRIES, Count, FileRecord, Finite, Meta, Number, Record, field

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
    text: str


class StoredProblem(Record, frozen=True, kw_only=True):
    """A problem of a proof: its code, and the message for people."""

    code: str
    message: str


class ClassChange(Record, frozen=True, kw_only=True):
    """An image that the exported file classifies differently: its name, and the class and probability of each."""

    image: str
    expected: str
    expected_probability: Finite | None
    exported: str
    exported_probability: Finite | None


class StoredProof(Record, frozen=True, kw_only=True):
    """How a file agrees with `gputrain predict`, see `engine.inference.export_proof.Proof`.

    `another_class` counts all changes, of which `changes` has the first. `top1_agreement` is null without images.
    """

    passed: bool
    top1_agreement: Share | None
    another_class: Count
    images: Count
    same_class: Count
    ties: Count
    max_difference: Finite | None
    max_program_difference: Finite | None
    max_pixel_difference: Count
    files: bool
    samples: Count
    unread: Count
    changes: tuple[ClassChange, ...]
    not_proved: StoredProblem | None
    faults: tuple[StoredProblem, ...]


class ExportedFile(Record, frozen=True, kw_only=True):
    """One file of the model: its input, its output, the steps that it contains, its SHA-256 and its proof."""

    format: ExportFormat
    contains: tuple[str, ...]
    input: TensorDescription
    output: TensorDescription
    sha256: str
    proof: StoredProof


class ExportMark(Record, frozen=True, kw_only=True):
    """What a model.json of any format has: the version of gputrain that wrote it."""

    gputrain: str


class ModelDescription(FileRecord, frozen=True, kw_only=True):
    """Content of model.json. `companions` has the SHA-256 of the other files by name.

    `epoch` is null for a checkpoint within an epoch, `val_accuracy` if it is not known. `transforms` are the steps from
    image file to the input of the network, each with its name, its parameters and a text.
    """

    gputrain: str
    run: str
    checkpoint: str
    step: Count
    epoch: Count | None
    val_accuracy: Share | None
    ema: bool
    weights_sha256: str
    model: Architecture
    classes: Annotated[tuple[str, ...], ENTRIES]
    image: InputImage
    transforms: Annotated[tuple[Annotated[dict[str, Any], ENTRIES], ...], ENTRIES]
    tta: Literal["none", "flip"]
    output: Literal["softmax", "sigmoid"]
    files: Annotated[dict[str, ExportedFile], ENTRIES] = field(default_factory=dict)
    companions: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
