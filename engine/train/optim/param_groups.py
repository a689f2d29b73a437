"""Builds parameter groups with their own learning rate scale and weight decay. `optimizers` calls it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from engine.base.errors import Problem, UsageError, did_you_mean, raise_if_any
from engine.config.training_sections import OptimConfig

# A parameter group in the format of `torch.optim.Optimizer`.
ParamGroup = dict[str, Any]
# Keys of `optim.weight_decay_groups` that stand for kinds of parameters instead of names.
DECAY_KINDS = ("bias", "norm")
_PATTERN_CHARACTERS = set("*?[")
_NORM_LAYERS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ParamGroupSummary:
    """The common settings of a parameter group, its number of tensors, and that of their values."""

    lr_scale: float
    weight_decay: float
    tensors: int
    parameters: int


def build_param_groups(config: OptimConfig, model: nn.Module) -> list[ParamGroup]:
    """Group the trainable parameters, with their names, by learning rate scale and weight decay, in model order.

    The default config yields one group. `lr_scale` is the product of the factors of `optim.layer_lr` and
    `optim.layer_decay`. Raises UsageError if a name of `optim.layer_lr` or `optim.weight_decay_groups` is not in the
    model, or no parameter is trainable.
    """
    parameters = list(model.named_parameters())
    _check_names(config, [name for name, _ in parameters])
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError.one("model.freeze", "all parameters are frozen; freeze fewer modules", code="invalid-value")
    layers = layer_ids(model) if config.layer_decay != 1.0 else {}
    last = max(layers.values(), default=0)
    decay_of = _weight_decay(config, model)
    groups: dict[tuple[float, float], ParamGroup] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        # The longest prefix, in whole dotted components.
        prefix = max((key for key in config.layer_lr if has_prefix(name, key)), key=len, default="")
        scale = config.layer_lr.get(prefix, 1.0) * config.layer_decay ** (last - layers.get(name, last))
        decay = decay_of(name, parameter)
        group = groups.setdefault((scale, decay), {"params": [], "lr_scale": scale, "weight_decay": decay})
        group["params"].append((name, parameter))
    return list(groups.values())


def summarize_param_groups(config: OptimConfig, model: nn.Module) -> list[ParamGroupSummary]:
    """Summarize the parameter groups of a model; none if all parameters are frozen. Raises UsageError for names that
    the model lacks."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return []
    return [
        ParamGroupSummary(
            group["lr_scale"],
            group["weight_decay"],
            len(group["params"]),
            sum(parameter.numel() for _, parameter in group["params"]),
        )
        for group in build_param_groups(config, model)
    ]


def _check_names(config: OptimConfig, names: list[str]) -> None:
    parts = name_parts(names)
    decay_names = [key for key in config.weight_decay_groups if key not in DECAY_KINDS]
    missing = [("optim.layer_lr", prefix) for prefix in config.layer_lr if prefix not in parts]
    missing += [
        ("optim.weight_decay_groups", key)
        for key in decay_names
        if not (any(fnmatchcase(name, key) for name in names) if _is_pattern(key) else key in parts)
    ]
    refuse_missing(missing, parts)


def name_parts(names: Iterable[str]) -> dict[str, None]:
    """Return the paths of the modules and the weights with these names, in order."""
    return dict.fromkeys(".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 2))


def refuse_missing(missing: Iterable[tuple[str, str]], parts: Collection[str], other: str = "") -> None:
    """Raise UsageError for pairs of a config key and a part in it that the model lacks. `other` is another choice."""
    choices = f"; choose from {', '.join(part for part in parts if '.' not in part)}{other}"
    raise_if_any(
        [
            Problem(
                key,
                f"the model has no weights named {name!r}{did_you_mean(name, parts) or choices}",
                code="unknown-value",
            )
            for key, name in missing
        ]
    )


def has_prefix(name: str, prefix: str) -> bool:
    """Whether a part of a model is that of a prefix, or in it."""
    return f"{name}.".startswith(f"{prefix}.")


def _is_pattern(key: str) -> bool:
    return not _PATTERN_CHARACTERS.isdisjoint(key)


def _weight_decay(config: OptimConfig, model: nn.Module) -> Callable[[str, nn.Parameter], float]:
    """Return the weight decay as a function of name and parameter: that of `optim.weight_decay_groups`, 0 if it is
    exempt, else `optim.weight_decay`.

    With `optim.decay_norms=false`, biases and normalization weights (fewer than two dimensions) are exempt, and the
    parameters that the model's `no_weight_decay` method names."""
    groups, decays_norms = config.weight_decay_groups, config.decay_norms
    # As in timm.
    exempt: Any = () if decays_norms else getattr(model, "no_weight_decay", tuple)()
    names = [key for key in groups if key not in DECAY_KINDS]
    # The parameters of normalization layers: torch's, and those of a class named so, as timm's.
    norms = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, _NORM_LAYERS) or "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }

    def decay_of(name: str, parameter: nn.Parameter) -> float:
        if not decays_norms and (parameter.ndim < 2 or any(fnmatchcase(name, pattern) for pattern in exempt)):
            return 0.0
        matches = [key for key in names if (fnmatchcase(name, key) if _is_pattern(key) else has_prefix(name, key))]
        if matches:
            return groups[max(matches, key=len)]
        if "bias" in groups and name.rpartition(".")[2] == "bias":
            return groups["bias"]
        return groups.get("norm", config.weight_decay) if name in norms else config.weight_decay

    return decay_of


def layer_ids(model: nn.Module) -> dict[str, int]:
    """Map each parameter name to its layer, from 0 at the input to the largest number at the head.

    timm models define their layers in `group_matcher`. Other models are walked in module order. The model, containers
    (Sequential, ModuleList, ModuleDict) and modules with more than half of the weights, such as the encoder of a vision
    transformer, are expanded; every other module, such as a ResNet block, is one part. A part with a parameter of two
    or more dimensions starts a new layer. A part without one, such as a norm, belongs to the previous layer, and so do
    direct parameters of an expanded module, such as the position embedding.
    """
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher: Any = model.group_matcher
        timm_layers: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
        return timm_layers
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: dict[str, int] = {}
    layer = -1
    for starts_layer, part in _iter_blocks(model, count_parameters(model) / 2):
        layer += starts_layer
        for parameter in part:
            layers.setdefault(names[id(parameter)], max(layer, 0))
    return layers


def _iter_blocks(module: nn.Module, max_block_size: float) -> Iterator[tuple[bool, list[nn.Parameter]]]:
    """Yield the parameters of each part of a model, and whether the part starts a new layer."""
    children = [child for child in module.children() if count_parameters(child)]
    expanded = (
        isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or count_parameters(module) > max_block_size
    )
    if not children or not expanded:
        parameters = list(module.parameters())
        yield any(parameter.ndim >= 2 for parameter in parameters), parameters
        return
    if direct := list(module.parameters(recurse=False)):
        yield False, direct
    for child in children:
        yield from _iter_blocks(child, max_block_size)


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Return the number of values of all parameters of a module, or of those that are trained."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trainable)
