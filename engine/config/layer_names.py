"""Layers of built-in models that an earlier version named differently.

What has the earlier names is renamed when it is read: `engine.config.loader` renames in configs,
`engine.training.checkpoint` in checkpoints, and `engine.models.transfer` in files of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from engine.config.schema import Config

T = TypeVar("T")

# Parts 3 to 10 of the earlier nn.Sequential are the blocks layer1.0 to layer4.1.
_RESNET_BLOCKS = {str(3 + index): f"layer{1 + index // 2}.{index % 2}" for index in range(8)}
# Earlier prefix of names to current prefix, longer prefixes first.
EARLIER_LAYER_NAMES: dict[str, dict[str, str]] = {
    "resnet18-small": {
        **{f"{before}.shortcut": f"{after}.downsample" for before, after in _RESNET_BLOCKS.items()},
        "0": "conv1",
        "1": "bn1",
        **_RESNET_BLOCKS,
        "13": "fc",
    }
}


def current_layer_name(model_name: str, name: str) -> str:
    """Return the current name of a layer or parameter of a model, given its current or its earlier name."""
    for before, after in EARLIER_LAYER_NAMES.get(model_name, {}).items():
        if f"{name}.".startswith(f"{before}."):
            return after + name.removeprefix(before)
    return name


def with_current_names(model_name: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return entries by layer or parameter, such as a state dict, with the current names and in the same order."""
    return {current_layer_name(model_name, str(name)): value for name, value in entries.items()}


def config_with_current_names(config: Config) -> Config:
    """Return the config with the current names in `model.freeze` and `optim.layer_lr`."""
    name, freeze, factors = config.model.name, config.model.freeze, config.optim.layer_lr
    if name not in EARLIER_LAYER_NAMES:
        return config
    if isinstance(freeze, tuple):
        freeze = tuple(current_layer_name(name, prefix) for prefix in freeze)
    update = {
        "model": config.model.model_copy(update={"freeze": freeze}),
        "optim": config.optim.model_copy(update={"layer_lr": with_current_names(name, factors)}),
    }
    return config.model_copy(update=update)


def checkpoint_with_current_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint with the current names of the layers. Content of wrong types is unchanged."""
    config = _mapping(state.get("config"))
    model, optim = _mapping(config.get("model")), _mapping(config.get("optim"))
    name = model.get("name")
    if not isinstance(name, str) or name not in EARLIER_LAYER_NAMES:
        return state
    renamed = dict(state)
    if isinstance(prefixes := model.get("freeze"), list):
        model = {**model, "freeze": [current_layer_name(name, str(prefix)) for prefix in prefixes]}
    if isinstance(factors := optim.get("layer_lr"), Mapping):
        optim = {**optim, "layer_lr": with_current_names(name, factors)}
    renamed["config"] = {**config, "model": model, "optim": optim}
    for key in ("model", "ema"):
        if isinstance(weights := state.get(key), Mapping):
            renamed[key] = with_current_names(name, weights)
    optimizer = _mapping(state.get("optimizer"))
    if isinstance(groups := optimizer.get("param_groups"), list):
        renamed["optimizer"] = {**optimizer, "param_groups": [_rename_group(name, group) for group in groups]}
    return renamed


def _rename_group(model_name: str, group: Any) -> Any:
    """Rename the `param_names` of a parameter group in the format of `torch.optim.Optimizer.state_dict`."""
    names = _mapping(group).get("param_names")
    if not isinstance(names, list):
        return group
    return {**group, "param_names": [current_layer_name(model_name, str(name)) for name in names]}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
