"""Optimizers by name: built, stepped, and put back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from engine.config.optimizer_options import DEFAULT_OVERRIDES, OPTIMIZERS, optimizer_kwargs
from engine.config.training_sections import OptimConfig
from engine.optim.lazy_dynamo import avoid_dynamo_import, unwrap_step
from engine.optim.lr_schedule import scaled_lr
from engine.optim.param_groups import ParamGroup, build_param_groups
from engine.optim.timm_optimizers import TIMM_PREFIX, timm_optimizer_problems, timm_options
from engine.utils.errors import UsageError

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


class _SupportsFoundInf(Protocol):
    """What torch's fused optimizers take from their gradient scaler: they leave a step out, without a word to the
    host, where `found_inf` is 1."""

    grad_scale: Tensor | None
    found_inf: Tensor | None


class MuonAdamW(Optimizer):
    """Muon for the parameters of exactly two dimensions, AdamW for all others, as one optimizer: its groups are
    Muon's, then AdamW's, and its state is that of both.

    Weights of convolutions have four dimensions, so a convolutional network trains with AdamW but for its linear
    layers; of a vision transformer nearly all weights are matrices.
    """

    def __init__(
        self, param_groups: list[ParamGroup], muon_options: dict[str, Any], adamw_options: dict[str, Any]
    ) -> None:
        matrices, others = split_matrices(param_groups)
        self.muon = optim.Muon(matrices, **muon_options)
        self.adamw = optim.AdamW(others, **adamw_options) if others else None
        named = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for part in self.sub_optimizers()
            for group in part.param_groups
        ]
        super().__init__(named, {})
        self._share_state()

    def sub_optimizers(self) -> list[Optimizer]:
        return [self.muon] if self.adamw is None else [self.muon, self.adamw]

    def _share_state(self) -> None:
        """Let both work on the groups and the state of the whole."""
        muons = len(self.muon.param_groups)
        for part, groups in zip(
            self.sub_optimizers(), (self.param_groups[:muons], self.param_groups[muons:]), strict=False
        ):
            part.param_groups, part.state = groups, self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.sub_optimizers():
            part.step()
        return loss


def split_matrices(param_groups: list[ParamGroup]) -> tuple[list[ParamGroup], list[ParamGroup]]:
    """The groups with only their parameters of exactly two dimensions, and with only the others; no group is empty."""
    matrices, others = (
        [
            {**group, "params": chosen}
            for group in param_groups
            if (chosen := [(name, one) for name, one in group["params"] if (one.ndim == 2) is wanted])
        ]
        for wanted in (True, False)
    )
    return matrices, others


def build_optimizer(config: OptimConfig, model: nn.Module, world_size: int = 1) -> Optimizer:
    """Over the parameters that train, see `build_param_groups`; fused where torch has it so, else as torch decides:
    with one kernel for many parameters on GPUs, one by one on the CPU, where the other way was not found to be faster.
    The learning rate is set before each step, see `set_lr`; it begins with the highest, which some of timm's optimizers
    take their weight decay from. Raises UsageError."""
    groups = build_param_groups(config, model)
    lr = scaled_lr(config, world_size)
    avoid_dynamo_import()
    if config.name.startswith(TIMM_PREFIX):
        optimizer = _build_timm(config, groups, lr)
    else:
        arguments = optimizer_kwargs(config, OPTIMIZERS[config.name], DEFAULT_OVERRIDES.get(config.name, {}))
        if config.name == "muon":
            optimizer = _build_muon(groups, lr, arguments)
        else:
            kind = OPTIMIZER_CLASSES[config.name]
            # The zeros that a fused SGD's momentum begins with would be dampened with the first gradient.
            kernels = {} if arguments.get("dampening") else fused_kwargs(kind)
            optimizer = kind(groups, **{"lr": lr, **arguments, **kernels})
    if isinstance(optimizer, optim.SGD):
        _init_momentum_buffers(optimizer)
    for part in optimizer.sub_optimizers() if isinstance(optimizer, MuonAdamW) else [optimizer]:
        unwrap_step(part)
    return optimizer


def _build_muon(param_groups: list[ParamGroup], lr: float, arguments: dict[str, Any]) -> Optimizer:
    if not hasattr(optim, "Muon"):
        raise UsageError.one("optim.name", f"muon came with torch 2.9, and this is torch {torch.__version__}")
    if not split_matrices(param_groups)[0]:
        raise UsageError.one("optim.name", "muon trains matrices, and none of this model trains; take adamw")
    betas = {"betas": arguments.pop("betas")} if "betas" in arguments else {}
    eps = {"eps": arguments["eps"]} if "eps" in arguments else {}
    adamw = {"lr": lr, "weight_decay": arguments["weight_decay"], **betas, **eps, "fused": True}
    return MuonAdamW(param_groups, {"lr": lr, **arguments}, adamw)


def _build_timm(config: OptimConfig, param_groups: list[ParamGroup], lr: float) -> Optimizer:
    if problems := timm_optimizer_problems(config):
        raise UsageError(problems)
    from timm.optim import create_optimizer_v2, get_optimizer_class

    options, name = timm_options(config.name), config.name.removeprefix(TIMM_PREFIX)
    momentum = {"momentum": options["momentum"].default} if "momentum" in options else {}
    arguments = {
        **optimizer_kwargs(config, options, momentum),
        **fused_kwargs(get_optimizer_class(name, bind_defaults=False)),
    }
    try:
        built: Optimizer = create_optimizer_v2(param_groups, name, lr, **arguments)
        if config.options:
            # Some values are only looked at in the first step.
            trial = nn.Linear(8, 8)
            trial(torch.ones(1, 8)).sum().backward()
            create_optimizer_v2(trial.parameters(), name, lr, **arguments).step()
    except Exception as error:
        # timm checks its arguments in many ways.
        why = f"{config.name} cannot be made with these: {type(error).__name__}: {error}"
        raise UsageError.one("optim.options", why) from error
    return built


def fused_kwargs(optimizer_class: Callable[..., Optimizer]) -> dict[str, bool]:
    """The argument for an optimizer that has kernels for all of its parameters at once. Adagrad's are not there for
    CUDA in every torch."""
    return (
        {"fused": True}
        if "fused" in inspect.signature(optimizer_class).parameters and optimizer_class is not optim.Adagrad
        else {}
    )


def _init_momentum_buffers(sgd: optim.SGD) -> None:
    """Momentum buffers of zeros: the fused first step makes them of memory as it finds it, which stays there if that
    step is left out."""
    for group in sgd.param_groups:
        if group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give each group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_step(optimizer: Optimizer, nonfinite: Tensor, *, may_skip: bool) -> None:
    """One step, which changes nothing where `nonfinite` (no dimension, bool, on the device) is true. Fused optimizers
    see to that on the device. Others have to wait for it, and only do so where steps `may_skip`: a run that may not is
    halted by its log before such a step is saved."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        skipping = cast(_SupportsFoundInf, optimizer)
        skipping.grad_scale, skipping.found_inf = None, nonfinite.float()
        optimizer.step()
        skipping.found_inf = None
    elif not (may_skip and nonfinite.item()):
        optimizer.step()


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take over the state of a checkpoint, by the names of the parameters, and keep the settings: both they and the
    groups may be changed on the way. What the checkpoint does not know begins anew."""
    own = optimizer.state_dict()
    numbers: dict[str, int] = {
        name: number
        for group in saved["param_groups"]
        for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    state = dict(own["state"])
    for group in own["param_groups"]:
        for name, number in zip(group["param_names"], group["params"], strict=True):
            if numbers.get(name) in saved["state"]:
                state[number] = saved["state"][numbers[name]]
    # Some of timm's optimizers count their steps in the groups, alike in all of them.
    counts = {key: value for key, value in saved["param_groups"][0].items() if key not in own["param_groups"][0]}
    groups = [{**group, **deepcopy(counts)} for group in own["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kept[key] = match_strides(value, parameter)


def match_strides(value: Tensor, reference: Tensor) -> Tensor:
    """`value`, laid out as a tensor of the same shape, as fused optimizers take it for granted of their state."""
    return (
        value if value.stride() == reference.stride() else torch.empty_like(reference, dtype=value.dtype).copy_(value)
    )
