"""A trained run, taken up again from one of its checkpoints: its classes, its images' format and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.loader import validate_config
from engine.config.schema import Config, sections
from engine.data.augment.batch_ops import convert_to_format, normalize
from engine.data.sources.base import ImageFormat
from engine.models.factory import build_model
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.training.checkpoint import load_checkpoint
from engine.utils.errors import UsageError
from engine.utils.files import expand_user, is_file


@dataclass(frozen=True)
class TrainedCheckpoint:
    """What a checkpoint tells of a training; `weights` are the averaged ones where `ema` says so."""

    path: Path
    config: Config
    classes: tuple[str, ...]
    image_format: ImageFormat
    weights: dict[str, Tensor]
    ema: bool
    step: int


@dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint in float32, in evaluation mode, on a device."""

    checkpoint: TrainedCheckpoint
    model: nn.Module
    device: torch.device

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """N x classes, on the model's device; `images` are N x C x H x W, uint8, of any size."""
        images = convert_to_format(images, self.checkpoint.image_format).to(self.device)
        shape = (1, self.checkpoint.image_format.channels, 1, 1)
        mean = torch.tensor(self.checkpoint.image_format.mean, device=self.device).view(shape)
        std = torch.tensor(self.checkpoint.image_format.std, device=self.device).view(shape)
        found: Tensor = self.model(normalize(images, mean, std))
        return found.float()

    def probabilities(self, images: Tensor) -> Tensor:
        """N x classes, on the model's device: they sum up to 1, but where the loss took each class for itself."""
        logits = self.logits(images)
        return logits.sigmoid() if self.checkpoint.config.loss.name == "bce" else logits.softmax(1)


def load_trained_model(
    folder: RunFolder, which: str = "best", *, device: str = "auto", raw: bool = False
) -> TrainedModel:
    """Raises UsageError."""
    return build_trained_model(read_trained_checkpoint(folder, which, raw=raw), device)


def read_trained_checkpoint(folder: RunFolder, which: str = "best", *, raw: bool = False) -> TrainedCheckpoint:
    """`which` is best (the last where no epoch was evaluated yet), last, or a file; `raw` takes the weights themselves
    where there are averaged ones as well. No thread is started and no GPU touched. Raises UsageError."""
    path = find_checkpoint(folder, which)
    try:
        state = load_checkpoint(path)
    except DamagedCheckpointError as error:
        raise UsageError.one(str(path), f"{error}; give another with --checkpoint last, or a file") from error
    images, ema = state["image_format"], state["ema"] is not None and not raw
    return TrainedCheckpoint(
        path=path,
        config=config_from_checkpoint(state["config"]),
        classes=tuple(state["classes"]),
        image_format=ImageFormat(images["size"], images["channels"], tuple(images["mean"]), tuple(images["std"])),
        weights=state["ema"] if ema else state["model"],
        ema=ema,
        step=state["step"],
    )


def find_checkpoint(folder: RunFolder, which: str) -> Path:
    """Raises UsageError."""
    names = {"best": ("best.pt", "last.pt"), "last": ("last.pt",)}
    if which not in names:
        path = expand_user(which)
        if not is_file(path):
            raise UsageError.one("--checkpoint", f"{which} is no file; give best, last or a file")
        return path
    for name in names[which]:
        if is_file(folder.checkpoints / name):
            return folder.checkpoints / name
    raise UsageError.one(folder.name, "has no checkpoint yet; it saves one at the end of an epoch")


def config_from_checkpoint(values: Mapping[str, Any]) -> Config:
    """The config that a checkpoint was made with, but for keys that there are no longer. Raises UsageError."""
    known = sections()
    kept = {
        section: {key: value for key, value in keys.items() if key in known[section].model_fields}
        for section, keys in values.items()
        if section in known
    }
    return validate_config(kept)


def build_trained_model(checkpoint: TrainedCheckpoint, device: str = "auto") -> TrainedModel:
    """Raises UsageError."""
    place = resolve_device(device)
    model = build_architecture(checkpoint)
    try:
        model.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        name = checkpoint.config.model.name
        raise UsageError.one(str(checkpoint.path), f"its weights do not fit the model {name}: {error}") from error
    return TrainedModel(checkpoint, model.float().eval().requires_grad_(False).to(place), place)


def build_architecture(checkpoint: TrainedCheckpoint) -> nn.Module:
    """The model of a checkpoint before its weights are put in; those that it began with are not fetched again."""
    config = checkpoint.config.model_copy(
        update={"model": checkpoint.config.model.model_copy(update={"weights": None})}
    )
    return build_model(config, checkpoint.image_format.channels, len(checkpoint.classes), checkpoint.image_format.size)


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one that works, else the CPU. Raises UsageError."""
    if name == "auto":
        gpu = torch.device("cuda", 0)
        return gpu if torch.cuda.is_available() and _device_fault(gpu) is None else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError.one("--device", f"{name} is not known; give auto, cpu, cuda or cuda:N")
    if (fault := _device_fault(device)) is not None:
        raise UsageError.one("--device", f"{name} cannot be used: {fault}; give auto or cpu")
    return device


def _device_fault(device: torch.device) -> str | None:
    """Why nothing can be computed there, None where it can."""
    try:
        torch.zeros(1, device=device).add(1).cpu()
    except (RuntimeError, AssertionError) as error:
        # torch without CUDA asserts that it has it.
        return str(error).partition("\n")[0]
    return None
