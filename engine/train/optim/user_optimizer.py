"""The user's own optimizer (`optim.name=module:name`): a class or function over parameter groups.

It is called with the groups (dicts of `params`, `param_names`, `lr`, `weight_decay` and `lr_scale`), with those of lr,
momentum, nesterov, betas, eps and weight_decay that its signature names and the config sets, and with `optim.options`.
`engine.train.optim.optimizers` calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from io import BytesIO
from pickle import PickleError
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from engine.base.errors import Problem, UsageError, did_you_mean
from engine.base.text import list_names
from engine.config.optimizer_options import COMMON_OPTIONS
from engine.config.run_sections import RunConfig
from engine.config.training_sections import OptimConfig
from engine.config.user_code import describe_value, load_user_code, user_failures
from engine.train.optim.param_groups import ParamGroup

OPTIMIZER_KEY = "optim.name"
MAX_LISTED_PARAMETERS = 3
# Settings of a group that the config of a resumed run decides, not its checkpoint.
GROUP_SETTINGS = ("params", "param_names", "lr", "lr_scale", "weight_decay", *COMMON_OPTIONS)
Restore = Callable[[Optimizer, dict[str, Any]], None]


def build_user_optimizer(
    config: OptimConfig, run: RunConfig, groups: list[ParamGroup], lr: float, restore: Restore, notes: list[Problem]
) -> Optimizer:
    """Build the user's optimizer for `groups`, whose `params` are pairs of name and parameter.

    Appends to `notes` what has no effect. `restore` loads a state. Raises UsageError if the code fails, does not return
    an optimizer of all parameters, or has a state that a checkpoint cannot hold.
    """
    factory: Any = load_user_code(OPTIMIZER_KEY, config.name, run.code, run.code_packages)
    arguments = _arguments(config, factory, lr, notes)

    def build(groups: list[ParamGroup]) -> Optimizer:
        plain = [
            {
                **group,
                "params": [parameter for _, parameter in group["params"]],
                "param_names": [name for name, _ in group["params"]],
                "lr": lr * group["lr_scale"],
            }
            for group in groups
        ]
        with _failures(config, run, "fails"):
            built = factory(plain, **arguments)
        return _check(config, built, groups, lr)

    _try_steps(config, run, groups, build, restore)
    return build(groups)


def _arguments(config: OptimConfig, factory: Any, lr: float, notes: list[Problem]) -> dict[str, Any]:
    """Return the keyword arguments of the factory. Raises UsageError for options that it does not take."""
    try:
        signature = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        signature = []
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature) or not signature
    # The first one receives the groups.
    names = [
        parameter.name
        for parameter in signature[1:]
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    settings = {"lr": lr, **{key: getattr(config, key) for key in COMMON_OPTIONS}}
    arguments = {key: value for key, value in settings.items() if key in names and value is not None}
    for key, value in settings.items():
        # A function may read the weight decay of the groups.
        if value and key not in names and not takes_any and (key != "weight_decay" or isinstance(factory, type)):
            reason = f"optim.{key}={value} has no effect with optim.name={config.name}, which has no {key}"
            notes.append(Problem("", reason, code="no-effect"))
    for key, value in config.options.items():
        if key in settings:
            raise UsageError.one("optim.options", f"{key} has its own config key; use optim.{key}", code="unknown-key")
        if key not in names and not takes_any:
            reason = f"{config.name} has no argument {key!r}{did_you_mean(key, names)}"
            raise UsageError.one("optim.options", reason, code="unknown-key")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    for parameter in signature[1:]:
        is_required = parameter.name in names and parameter.default is inspect.Parameter.empty
        if is_required and parameter.name not in arguments:
            is_key = parameter.name in settings
            key = f"optim.{parameter.name}" if is_key else "optim.options"
            reason = f"{config.name} requires {parameter.name}; set it here"
            raise UsageError.one(key, reason, code="missing-value")
    return arguments


def _check(config: OptimConfig, built: Any, groups: list[ParamGroup], lr: float) -> Optimizer:
    """Return the optimizer with names and `lr_scale` in each group. Raises UsageError if it cannot train the model."""
    if not isinstance(built, Optimizer):
        reason = f"{config.name} must return a torch.optim.Optimizer, not {describe_value(built)}"
        raise UsageError.one(OPTIMIZER_KEY, reason, code="invalid-value")
    names = {id(parameter): name for group in groups for name, parameter in group["params"]}
    scales = {id(parameter): group["lr_scale"] for group in groups for _, parameter in group["params"]}
    received = [id(parameter) for group in built.param_groups for parameter in group["params"]]
    if missing := [name for key, name in names.items() if key not in set(received)]:
        listed = list_names(missing, MAX_LISTED_PARAMETERS)
        reason = f"{config.name} does not train {len(missing)} of {len(names)} parameters: {listed}"
        raise UsageError.one(
            OPTIMIZER_KEY, reason, "give it all groups, or freeze them with model.freeze", code="invalid-value"
        )
    for group in built.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
        own_lr = group.get("lr")
        if "lr_scale" not in group or (own_lr is not None and own_lr != lr * group["lr_scale"]):
            # A learning rate of the user's own keeps its ratio to the peak learning rate.
            own = [scales[id(parameter)] for parameter in group["params"]]
            group["lr_scale"] = float(own_lr) / lr if own_lr is not None else own[0] if own else 1.0
    return built


def _try_steps(
    config: OptimConfig,
    run: RunConfig,
    groups: list[ParamGroup],
    build: Callable[[list[ParamGroup]], Optimizer],
    restore: Restore,
) -> None:
    """Take two steps with copies of the parameters, and save and restore the state after each.

    Raises UsageError if that fails, or `torch.load` refuses the state.
    """
    copies = [
        {**group, "params": [(name, nn.Parameter(value.detach().clone())) for name, value in group["params"]]}
        for group in groups
    ]
    parameters = [parameter for group in copies for _, parameter in group["params"]]
    with torch.random.fork_rng({parameter.device for parameter in parameters if parameter.is_cuda}):
        optimizer = build(copies)
        for step in ("first", "second"):
            with _failures(config, run, f"fails in its {step} step"):
                for parameter in parameters:
                    parameter.grad = torch.sin(parameter.detach() * 100)
                optimizer.step()
            buffer = BytesIO()
            try:
                torch.save(optimizer.state_dict(), buffer)
                buffer.seek(0)
                saved = torch.load(buffer, weights_only=True)
            except (PickleError, RuntimeError, TypeError, AttributeError) as error:
                reason = (
                    f"{config.name} has a state that a checkpoint cannot hold ({type(error).__name__}); keep tensors, "
                    "numbers, text, lists and dicts in optimizer.state and the groups"
                )
                raise UsageError.one(OPTIMIZER_KEY, reason, code="not-supported") from error
            with _failures(config, run, "fails when its state is restored"):
                restore(optimizer, saved)


def _failures(config: OptimConfig, run: RunConfig, what: str) -> AbstractContextManager[None]:
    return user_failures(OPTIMIZER_KEY, f"{config.name} {what}", run.code, run.code_packages)


def restored_groups(current: list[ParamGroup], saved: list[ParamGroup], own_options: set[str]) -> list[ParamGroup]:
    """Return the current groups with what the saved ones counted: all but the settings of the config."""
    group_of = {name: group for group in saved for name in group["param_names"]}
    kept = {*GROUP_SETTINGS, *own_options}
    groups = []
    for group in current:
        before = next((group_of[name] for name in group["param_names"] if name in group_of), {})
        groups.append({**group, **{key: deepcopy(value) for key, value in before.items() if key not in kept}})
    return groups
