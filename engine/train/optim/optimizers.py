"""Builds, steps and restores optimizers by their config name.

`engine.train.loop` calls it; `param_groups` provides the parameter groups, and `timm_optimizers` the options of timm's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.libraries import import_library
from engine.config.optimizer_options import DEFAULT_OVERRIDES, OPTIMIZERS, optimizer_kwargs
from engine.config.run_sections import RunConfig
from engine.config.training_sections import TIMM_PREFIX, OptimConfig
from engine.config.user_code import is_user_optimizer
from engine.train.optim.lazy_dynamo import avoid_dynamo_import, unwrap_step
from engine.train.optim.lr_schedule import scaled_lr
from engine.train.optim.param_groups import ParamGroup, build_param_groups
from engine.train.optim.timm_optimizers import timm_optimizer_problems, timm_options
from engine.train.optim.user_optimizer import build_user_optimizer, restored_groups

OPTIMIZER_CLASSES: dict[str, type[Optimizer]] = {
    "sgd": optim.SGD,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
}


def build_optimizer(
    config: OptimConfig,
    model: nn.Module,
    world_size: int = 1,
    run: RunConfig | None = None,
    notes: list[Problem] | None = None,
) -> Optimizer:
    """Build the optimizer for the trainable parameters of `model`; see `build_param_groups`. `run` says where user code
    is imported from; messages about it are appended to `notes`.

    Uses torch's fused implementation if there is one, else torch's default: foreach on GPUs, a loop on the CPU, where
    foreach measured no faster. `set_lr` sets the learning rate before each step. The initial value is the peak learning
    rate, from which some of timm's optimizers derive their weight decay. Raises UsageError if the config does not fit
    the model or the installed libraries.
    """
    groups = build_param_groups(config, model)
    lr = scaled_lr(config, world_size)
    avoid_dynamo_import()
    if is_user_optimizer(config.name):
        restore = partial(restore_optimizer, config=config)
        own = build_user_optimizer(config, run or RunConfig(), groups, lr, restore, [] if notes is None else notes)
        # Without torch's wrapper around `step`, hooks would not run.
        if not (own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks):
            unwrap_step(own)
        return own
    if config.name.startswith(TIMM_PREFIX):
        optimizer = _build_timm(config, groups, lr)
    else:
        arguments = optimizer_kwargs(config, OPTIMIZERS[config.name], DEFAULT_OVERRIDES.get(config.name, {}))
        if config.name == "muon":
            optimizer = _build_muon(groups, lr, arguments)
        else:
            optimizer_class = OPTIMIZER_CLASSES[config.name]
            # torch initializes the momentum buffer with the undampened first gradient; `_init_momentum_buffers` sets
            # zeros for fused SGD, so that gradient would be dampened.
            kernels = {} if arguments.get("dampening") else fused_kwargs(optimizer_class, groups)
            optimizer = optimizer_class(groups, **{"lr": lr, **arguments, **kernels})
    if isinstance(optimizer, optim.SGD):
        _init_momentum_buffers(optimizer)
    for plain_optimizer in optimizer.optimizers if isinstance(optimizer, MuonAdamW) else [optimizer]:
        unwrap_step(plain_optimizer)
    return optimizer


def _build_muon(param_groups: list[ParamGroup], lr: float, arguments: dict[str, Any]) -> Optimizer:
    if not any(value.ndim == 2 for group in param_groups for _, value in group["params"]):
        reason = "muon trains matrices, and this model has no trainable matrix; use adamw"
        raise UsageError.one("optim.name", reason, code="not-supported")
    betas = {"betas": arguments.pop("betas")} if "betas" in arguments else {}
    shared = {key: value for key, value in arguments.items() if key in ("eps", "weight_decay")}
    return MuonAdamW(param_groups, {"lr": lr, **arguments}, {"lr": lr, **shared, **betas, "fused": True})


def _build_timm(config: OptimConfig, param_groups: list[ParamGroup], lr: float) -> Optimizer:
    raise_if_any(timm_optimizer_problems(config))
    timm_optim = import_library("timm.optim", "optim.name")
    options, name = timm_options(config.name), config.name.removeprefix(TIMM_PREFIX)
    momentum = {"momentum": options["momentum"].default} if "momentum" in options else {}
    arguments = {
        **optimizer_kwargs(config, options, momentum),
        **fused_kwargs(timm_optim.get_optimizer_class(name, bind_defaults=False), param_groups),
    }
    try:
        built: Optimizer = timm_optim.create_optimizer_v2(param_groups, name, lr, **arguments)
        if config.options:
            # Some optimizers validate their options only in the first step.
            trial = nn.Linear(8, 8)
            trial(torch.ones(1, 8)).sum().backward()
            timm_optim.create_optimizer_v2(trial.parameters(), name, lr, **arguments).step()
    except Exception as error:
        # timm rejects invalid options with exceptions of any type.
        reason = f"{config.name} cannot be created with these options: {type(error).__name__}: {error}"
        raise UsageError.one("optim.options", reason, code="invalid-value") from error
    return built


def fused_kwargs(optimizer_class: Callable[..., Optimizer], groups: list[ParamGroup]) -> dict[str, bool]:
    """Return `fused=True` as a keyword argument if the class supports it for the weights in `groups`, else nothing.

    Adagrad is excluded, because not every torch version has its fused kernel for CUDA. SGD is excluded for float16 and
    bfloat16 weights on the CPU: up to torch 2.13, its kernel leaves most of them unchanged (pytorch#191763).
    """
    if "fused" not in inspect.signature(optimizer_class).parameters or optimizer_class is optim.Adagrad:
        return {}
    weights = [weight for group in groups for _, weight in group["params"]]
    if optimizer_class is optim.SGD and any(weight.is_cpu and weight.dtype.itemsize == 2 for weight in weights):
        return {}
    return {"fused": True}


def _init_momentum_buffers(sgd: optim.SGD) -> None:
    """Initialize the momentum buffers of fused SGD with zeros.

    The first fused step allocates them uninitialized, and a skipped first step would leave them so.
    """
    for group in sgd.param_groups:
        if group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of each group to `lr` times its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_step(optimizer: Optimizer, nonfinite: Tensor, *, may_skip: bool) -> None:
    """Take an optimizer step, or skip it if `nonfinite`, a scalar bool tensor on the device, is true.

    Fused optimizers skip on the device. Others need a host sync and therefore check only if `may_skip` is set; without
    it, the step log stops the run before a checkpoint contains such a step.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Attributes that torch's GradScaler sets on fused optimizers; they skip the step if `found_inf` is 1.
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, nonfinite.float()
        optimizer.step()
        fused.found_inf = None
    elif not (may_skip and nonfinite.item()):
        optimizer.step()


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any], config: OptimConfig | None = None) -> None:
    """Load the state of a checkpoint, matched by parameter name, and keep the groups and settings of `optimizer`.

    Groups and settings may differ from those of the checkpoint. Parameters without saved state keep their initial
    state. With the `config` of the user's own optimizer, whatever else its groups and its state hold is loaded too.
    """
    current = optimizer.state_dict()
    saved_indices: dict[str, int] = {
        name: index
        for group in saved["param_groups"]
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    state = dict(current["state"])
    for group in current["param_groups"]:
        for name, index in zip(group["param_names"], group["params"], strict=True):
            if saved_indices.get(name) in saved["state"]:
                state[index] = saved["state"][saved_indices[name]]
    # Some of timm's optimizers keep a step count in every group, with the same value.
    counts = {key: value for key, value in saved["param_groups"][0].items() if key not in current["param_groups"][0]}
    groups = [{**group, **deepcopy(counts)} for group in current["param_groups"]]
    others: dict[str, Any] = {}
    if config is not None and is_user_optimizer(config.name):
        groups = restored_groups(current["param_groups"], saved["param_groups"], set(config.options))
        indices = set(saved_indices.values())
        state |= {key: value for key, value in saved["state"].items() if key not in indices}
        others = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    optimizer.load_state_dict({**others, "state": state, "param_groups": groups})
    for parameter, parameter_state in optimizer.state.items():
        for key, value in parameter_state.items():
            # Fused optimizers require the strides of the parameter.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                parameter_state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


class MuonAdamW(Optimizer):
    """Muon for all two-dimensional parameters and AdamW for the others, as one optimizer.

    A convolutional network trains with AdamW except for its linear layers; most weights of a vision transformer are
    matrices. The groups are those of `optimizers` in order, and the state is the union of theirs.
    """

    def __init__(
        self, param_groups: list[ParamGroup], muon_options: dict[str, Any], adamw_options: dict[str, Any]
    ) -> None:
        self.optimizers: list[Optimizer] = []
        if matrices := _select(param_groups, matrices=True):
            self.optimizers.append(optim.Muon(matrices, **muon_options))
        if others := _select(param_groups, matrices=False):
            self.optimizers.append(optim.AdamW(others, **adamw_options))
        named = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        super().__init__(named, {})
        self._share_state()

    def _share_state(self) -> None:
        """Make both optimizers use this optimizer's groups and state."""
        end = 0
        for optimizer in self.optimizers:
            start, end = end, end + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[start:end], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def _select(param_groups: list[ParamGroup], *, matrices: bool) -> list[ParamGroup]:
    """Return the groups with their matrices, or with their other parameters, without empty ones."""
    selected = [[pair for pair in group["params"] if (pair[1].ndim == 2) == matrices] for group in param_groups]
    return [{**group, "params": pairs} for group, pairs in zip(param_groups, selected, strict=True) if pairs]
