"""Build the model of a run for training: architecture, initial weights, frozen parts, device, memory format and
precision. `engine.training.train` calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.config.schema import Config
from engine.data.sources.base import ImageFormat
from engine.models.compile import compile_in_place
from engine.models.ema import ModelEma
from engine.models.factory import build_model, check_model
from engine.models.freeze import convert_to_sync_batch_norm, freeze, nothing_to_synchronize
from engine.models.memory_format import apply_memory_format, resolve_memory_format
from engine.models.precision import apply_half_precision
from engine.models.transfer import load_weights
from engine.utils.errors import Problem, UsageError, collect_problems


@dataclass(frozen=True)
class TrainingModel:
    """`model` computes. `master` holds the trained float32 weights for O2, else None. `frozen` are the layers that stay
    in evaluation mode. `notes` go to the log."""

    model: nn.Module
    master: nn.Module | None
    frozen: list[nn.Module]
    ema: ModelEma | None
    notes: list[Problem]

    @property
    def optimized_model(self) -> nn.Module:
        """The model whose parameters the optimizer receives."""
        return self.master or self.model


def build_training_model(
    config: Config,
    image_format: ImageFormat,
    classes: Sequence[str],
    device: torch.device,
    problems: list[Problem],
    checkpoint: Mapping[str, Any] | None = None,
) -> TrainingModel:
    """Build the model; `checkpoint` is the one to resume from. Problems with weights and frozen parts are appended to
    `problems`. Raises UsageError if the model cannot be built."""
    notes: list[Problem] = []
    model = build_model(config, image_format.channels, len(classes), image_format.size)
    check_model(model, config, image_format, image_format.size, len(classes))
    for size in set(image_format.train_sizes) - {image_format.size}:
        check_model(model, config, image_format, size, len(classes), size_key="data.size_schedule")
    if image_format.val_size not in image_format.train_sizes:
        check_model(model, config, image_format, image_format.val_size, len(classes), size_key="data.val_crop")
    with collect_problems(problems):
        if checkpoint:
            load_checkpoint_weights(model, checkpoint, config)
        elif config.model.weights is not None:
            loaded = load_weights(model, config, image_format.size, classes)
            notes += [Problem("", loaded.describe(), code="weights-loaded")] if loaded is not None else []
    frozen: list[nn.Module] = []
    with collect_problems(problems):
        frozen = freeze(model, config.model)
    with collect_problems(problems):
        # The preflight warns that it has no effect on the CPU and with DataParallel.
        if config.model.sync_bn and device.type != "cpu" and config.device.parallel == "ddp":
            if reason := nothing_to_synchronize(model, frozen):
                notes.append(Problem("", f"model.sync_bn=true has no effect {reason}", code="no-effect"))
            model = convert_to_sync_batch_norm(model, frozen)
    apply_memory_format(model.to(device), resolve_memory_format(config, model, device))
    ema, master = None, None
    try:
        ema = ModelEma(model, config.model.ema) if config.model.ema else None
        master = apply_half_precision(model, config.precision)
    except RuntimeError as error:
        # deepcopy fails on non-leaf tensors, which torch's old weight_norm keeps.
        key = "model.ema" if config.model.ema else "precision.amp"
        problems.append(
            Problem(
                key,
                f"requires a copy of the model, and {config.model.name} cannot be copied: {error}",
                code="not-supported",
            )
        )
    compile_in_place(model, config)
    return TrainingModel(model, master, frozen, ema, notes)


def load_checkpoint_weights(model: nn.Module, checkpoint: Mapping[str, Any], config: Config) -> None:
    """Load the weights of a checkpoint. Raises UsageError if its model differs."""
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise UsageError.one(
            "model.name",
            f"the checkpoint does not match {config.model.name}: {error}; resume with the config of the run",
            code="conflict",
        ) from error
