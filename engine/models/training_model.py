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
from engine.models.ema import Ema
from engine.models.factory import build_model, check_model
from engine.models.freeze import freeze, sync_batch_norm
from engine.models.memory_format import arrange, memory_format
from engine.models.precision import halve
from engine.models.transfer import load_weights
from engine.utils.errors import Problem, UsageError, collecting


@dataclass(frozen=True)
class Network:
    """`model` is what computes; `master` holds the weights that are trained where those are not the model's own;
    `frozen` are the parts that stay in evaluation mode; `notes` are for the log."""

    model: nn.Module
    master: nn.Module | None
    frozen: list[nn.Module]
    ema: Ema | None
    notes: list[str]

    @property
    def trained(self) -> nn.Module:
        """What the optimizer is given."""
        return self.master or self.model


def build_network(
    config: Config,
    images: ImageFormat,
    classes: Sequence[str],
    device: torch.device,
    problems: list[Problem],
    saved: Mapping[str, Any] | None = None,
) -> Network:
    """`saved` is the checkpoint to go on from. What is wrong with the weights and the frozen parts is added to
    `problems`; raises UsageError where there can be no model at all."""
    notes: list[str] = []
    model = build_model(config, images.channels, len(classes), images.size)
    check_model(model, config.model.name, images.channels, images.size, len(classes))
    with collecting(problems):
        if saved:
            fit_checkpoint(model, saved, config, classes)
        elif config.model.weights is not None:
            loaded = load_weights(model, config, images.size, classes)
            notes += [loaded.in_words()] if loaded is not None else []
    frozen: list[nn.Module] = []
    with collecting(problems):
        frozen = freeze(model, config.model)
    with collecting(problems):
        if config.model.sync_bn:
            model = sync_batch_norm(model, frozen)
    arrange(model.to(device), memory_format(config, model, device))
    ema, master = None, None
    try:
        ema = Ema(model, config.model.ema) if config.model.ema else None
        master = halve(model, config.precision)
    except RuntimeError as error:
        # deepcopy's, of tensors that the model computed and keeps, as torch's older weight_norm does.
        key = "model.ema" if config.model.ema else "precision.amp"
        problems.append(Problem(key, f"needs a copy of the model, and {config.model.name} cannot be copied: {error}"))
    compile_in_place(model, config)
    return Network(model, master, frozen, ema, notes)


def fit_checkpoint(model: nn.Module, saved: Mapping[str, Any], config: Config, classes: Sequence[str]) -> None:
    """Put the weights of a checkpoint into the model. Raises UsageError where they are not its own."""
    if saved["classes"] != list(classes):
        was = saved["classes"]
        raise UsageError.one(
            "data.path", f"the checkpoint was trained on the classes {was}, and the data has {list(classes)}"
        )
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise UsageError.one(
            "model.name",
            f"the checkpoint does not fit {config.model.name}: {error}; continue with the config that it was made with",
        ) from error
