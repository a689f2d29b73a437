"""The model of a run, as it is trained: built, with the weights that it begins with, frozen in parts, brought to its
device and to the numbers that it computes with."""

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
from engine.models.freeze import convert_to_sync_batch_norm, freeze
from engine.models.memory_format import apply_memory_format, resolve_memory_format
from engine.models.precision import apply_half_precision
from engine.models.transfer import load_weights
from engine.utils.errors import Problem, UsageError, collect_problems


@dataclass(frozen=True)
class TrainingModel:
    """`model` is what computes; `master` holds the weights that are trained where those are not the model's own;
    `frozen` are the parts that stay in evaluation mode; `notes` are for the log."""

    model: nn.Module
    master: nn.Module | None
    frozen: list[nn.Module]
    ema: ModelEma | None
    notes: list[str]

    @property
    def optimized_model(self) -> nn.Module:
        """What the optimizer is given."""
        return self.master or self.model


def build_training_model(
    config: Config,
    image_format: ImageFormat,
    classes: Sequence[str],
    device: torch.device,
    problems: list[Problem],
    checkpoint: Mapping[str, Any] | None = None,
) -> TrainingModel:
    """`checkpoint` is the checkpoint to go on from. What is wrong with the weights and the frozen parts is added to
    `problems`; raises UsageError where there can be no model at all."""
    notes: list[str] = []
    model = build_model(config, image_format.channels, len(classes), image_format.size)
    check_model(model, config.model.name, image_format.channels, image_format.size, len(classes))
    with collect_problems(problems):
        if checkpoint:
            load_checkpoint_weights(model, checkpoint, config, classes)
        elif config.model.weights is not None:
            loaded = load_weights(model, config, image_format.size, classes)
            notes += [loaded.describe()] if loaded is not None else []
    frozen: list[nn.Module] = []
    with collect_problems(problems):
        frozen = freeze(model, config.model)
    with collect_problems(problems):
        if config.model.sync_bn:
            model = convert_to_sync_batch_norm(model, frozen)
    apply_memory_format(model.to(device), resolve_memory_format(config, model, device))
    ema, master = None, None
    try:
        ema = ModelEma(model, config.model.ema) if config.model.ema else None
        master = apply_half_precision(model, config.precision)
    except RuntimeError as error:
        # deepcopy's, of tensors that the model computed and keeps, as torch's older weight_norm does.
        key = "model.ema" if config.model.ema else "precision.amp"
        problems.append(Problem(key, f"needs a copy of the model, and {config.model.name} cannot be copied: {error}"))
    compile_in_place(model, config)
    return TrainingModel(model, master, frozen, ema, notes)


def load_checkpoint_weights(
    model: nn.Module, checkpoint: Mapping[str, Any], config: Config, classes: Sequence[str]
) -> None:
    """Put the weights of a checkpoint into the model. Raises UsageError where they are not its own."""
    if checkpoint["classes"] != list(classes):
        was = checkpoint["classes"]
        raise UsageError.one(
            "data.path", f"the checkpoint was trained on the classes {was}, and the data has {list(classes)}"
        )
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise UsageError.one(
            "model.name",
            f"the checkpoint does not fit {config.model.name}: {error}; continue with the config that it was made with",
        ) from error
