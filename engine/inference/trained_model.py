"""A trained run, taken up again from one of its checkpoints: its classes, its images' format and its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.loader import check
from engine.config.schema import Config, sections
from engine.data.augment.batch_ops import fit, normalise
from engine.data.sources.base import ImageFormat
from engine.models.factory import build_model
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.training.checkpoint import load_checkpoint
from engine.utils.errors import UsageError
from engine.utils.files import expand, is_file


@dataclass(frozen=True)
class Saved:
    """What a checkpoint tells of a training; `weights` are the averaged ones where `ema` says so."""

    path: Path
    config: Config
    classes: tuple[str, ...]
    image_format: ImageFormat
    weights: dict[str, Tensor]
    ema: bool
    step: int


@dataclass(frozen=True)
class Trained:
    """The model of a checkpoint in float32, in evaluation mode, on a device."""

    saved: Saved
    model: nn.Module
    device: torch.device

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """N x classes, on the model's device; `images` are N x C x H x W, uint8, of any size."""
        images = fit(images, self.saved.image_format).to(self.device)
        shape = (1, self.saved.image_format.channels, 1, 1)
        mean = torch.tensor(self.saved.image_format.mean, device=self.device).view(shape)
        std = torch.tensor(self.saved.image_format.std, device=self.device).view(shape)
        found: Tensor = self.model(normalise(images, mean, std))
        return found.float()

    def probabilities(self, images: Tensor) -> Tensor:
        """N x classes, on the model's device: they sum up to 1, but where the loss took each class for itself."""
        logits = self.logits(images)
        return logits.sigmoid() if self.saved.config.loss.name == "bce" else logits.softmax(1)


def load_trained(folder: RunFolder, which: str = "best", *, device: str = "auto", raw: bool = False) -> Trained:
    """Raises UsageError."""
    return build_trained(read_saved(folder, which, raw=raw), device)


def read_saved(folder: RunFolder, which: str = "best", *, raw: bool = False) -> Saved:
    """`which` is best (the last where no epoch was evaluated yet), last, or a file; `raw` takes the weights themselves
    where there are averaged ones as well. No thread is started and no GPU touched. Raises UsageError."""
    path = find_checkpoint(folder, which)
    try:
        state = load_checkpoint(path)
    except DamagedCheckpointError as error:
        raise UsageError.one(str(path), f"{error}; give another with --checkpoint last, or a file") from error
    images, ema = state["image_format"], state["ema"] is not None and not raw
    return Saved(
        path,
        config_of(state["config"]),
        tuple(state["classes"]),
        ImageFormat(images["size"], images["channels"], tuple(images["mean"]), tuple(images["std"])),
        state["ema"] if ema else state["model"],
        ema,
        state["step"],
    )


def find_checkpoint(folder: RunFolder, which: str) -> Path:
    """Raises UsageError."""
    names = {"best": ("best.pt", "last.pt"), "last": ("last.pt",)}
    if which not in names:
        path = expand(which)
        if not is_file(path):
            raise UsageError.one("--checkpoint", f"{which} is no file; give best, last or a file")
        return path
    for name in names[which]:
        if is_file(folder.checkpoints / name):
            return folder.checkpoints / name
    raise UsageError.one(folder.name, "has no checkpoint yet; it saves one at the end of an epoch")


def config_of(values: Mapping[str, Any]) -> Config:
    """The config that a checkpoint was made with, but for keys that there are no longer. Raises UsageError."""
    known = sections()
    kept = {
        section: {key: value for key, value in keys.items() if key in known[section].model_fields}
        for section, keys in values.items()
        if section in known
    }
    return check(kept)


def build_trained(saved: Saved, device: str = "auto") -> Trained:
    """Raises UsageError."""
    place = find_device(device)
    model = empty_model(saved)
    try:
        model.load_state_dict(saved.weights)
    except RuntimeError as error:
        name = saved.config.model.name
        raise UsageError.one(str(saved.path), f"its weights do not fit the model {name}: {error}") from error
    return Trained(saved, model.float().eval().requires_grad_(False).to(place), place)


def empty_model(saved: Saved) -> nn.Module:
    """The model of a checkpoint before its weights are put in; those that it began with are not fetched again."""
    config = saved.config.model_copy(update={"model": saved.config.model.model_copy(update={"weights": None})})
    return build_model(config, saved.image_format.channels, len(saved.classes), saved.image_format.size)


def find_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one that works, else the CPU. Raises UsageError."""
    if name == "auto":
        gpu = torch.device("cuda", 0)
        return gpu if torch.cuda.is_available() and _fault_of(gpu) is None else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError.one("--device", f"{name} is not known; give auto, cpu, cuda or cuda:N")
    if (fault := _fault_of(device)) is not None:
        raise UsageError.one("--device", f"{name} cannot be used: {fault}; give auto or cpu")
    return device


def _fault_of(device: torch.device) -> str | None:
    """Why nothing can be computed there, None where it can."""
    try:
        torch.zeros(1, device=device).add(1).cpu()
    except (RuntimeError, AssertionError) as error:
        # torch without CUDA asserts that it has it.
        return str(error).partition("\n")[0]
    return None
