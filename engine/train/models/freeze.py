"""Freeze parts of a model and convert BatchNorm to SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from engine.base.errors import UsageError
from engine.config.training_sections import ModelConfig
from engine.train.optim.param_groups import has_prefix, name_parts, refuse_missing


def freeze(model: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """Set `requires_grad=False` on what `model.freeze` names. Return the frozen normalization layers, which stay in
    evaluation mode (see `set_train_mode`); dropout in frozen parts stays active. Raises UsageError for unknown
    names."""
    if config.freeze == "none":
        return []
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if config.freeze == "backbone":
        heads = classifier_paths(model)
        frozen = {name for name in names if not any(has_prefix(name, head) for head in heads)}
    else:
        parts = name_parts(names)
        missing = [("model.freeze", prefix) for prefix in config.freeze if prefix not in parts]
        refuse_missing(missing, parts, ", or backbone for all but the head")
        frozen = {name for name in names if any(has_prefix(name, prefix) for prefix in config.freeze)}
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return [
        part
        for path, part in model.named_modules()
        if getattr(part, "running_mean", None) is not None and _is_frozen(path, part, frozen)
    ]


def _is_frozen(path: str, norm: nn.Module, frozen: Collection[str]) -> bool:
    """Return whether a normalization layer is frozen. A layer without weights is judged by its path."""
    weights = list(norm.parameters(recurse=False))
    if weights:
        return not any(weight.requires_grad for weight in weights)
    return f"{path}.running_mean" in frozen


def set_train_mode(model: nn.Module, frozen_layers: Iterable[nn.Module]) -> None:
    """Call `model.train()`, but keep the frozen layers in evaluation mode so that their running statistics do not
    change."""
    model.train()
    for part in frozen_layers:
        part.eval()


def classifier_paths(model: nn.Module) -> list[str]:
    """Return the paths of the classification head: timm's `get_classifier`, torchvision's head by its usual name, else
    the last layer with parameters."""
    library = type(model).__module__.partition(".")[0]
    get_classifier: Any = getattr(model, "get_classifier", None)
    if library == "timm" and get_classifier is not None:
        classifier = get_classifier()
        heads = classifier if isinstance(classifier, tuple | list) else (classifier,)
        return [path for path, part in model.named_modules() if any(part is head for head in heads)]
    if library == "torchvision":
        for name in ("fc", "classifier", "heads", "head"):
            if isinstance(getattr(model, name, None), nn.Module):
                return [name]
    with_weights = [path for path, part in model.named_modules() if list(part.parameters(recurse=False))]
    return with_weights[-1:]


def convert_to_sync_batch_norm(model: nn.Module, frozen_layers: Iterable[nn.Module]) -> nn.Module:
    """Replace every BatchNorm that is not frozen by SyncBatchNorm; parameters stay the same objects. Raises UsageError
    for layers that cannot be converted."""
    still = set(frozen_layers)
    layers = [(path, part) for path, part in model.named_modules() if isinstance(part, _BatchNorm)]
    for path, part in layers:
        if part in still:
            continue
        convert = _sync_batch_norm_converter(path, part)
        if path == "":
            return convert(part)
        model.set_submodule(path, convert(part))
    return model


def nothing_to_synchronize(model: nn.Module, frozen_layers: Iterable[nn.Module]) -> str:
    """Return why SyncBatchNorm would change nothing, as a clause that follows "has no effect"; "" if it would."""
    layers = {part for part in model.modules() if isinstance(part, _BatchNorm)}
    if not layers:
        return "on a model without BatchNorm"
    return "" if layers - set(frozen_layers) else "on a model whose BatchNorm layers are all frozen"


def _sync_batch_norm_converter(path: str, layer: nn.Module) -> Callable[[nn.Module], nn.Module]:
    """Return the conversion for a layer. torch's own would drop what a subclass adds to the forward, such as timm's
    fused activations. Raises UsageError."""
    if type(layer).__module__.startswith("timm."):
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise UsageError.one(
            "model.sync_bn",
            f"{path} is a {type(layer).__name__} with its own forward, which cannot be converted",
            code="not-supported",
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm
