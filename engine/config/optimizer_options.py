"""Options of torch's optimizers (names, allowed values, defaults) and their validation, without importing torch.

`engine.config.rules` reports the problems; `engine.train.optim.optimizers` builds the optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from engine.base.errors import Problem, did_you_mean
from engine.config.training_sections import OptimConfig, default_lr


class ValueRule(NamedTuple):
    """Allowed values of an option, as text and as a predicate."""

    allowed: str
    is_valid: Callable[[Any], bool]


class OptimizerOption(NamedTuple):
    """Default and allowed values of one optimizer option."""

    default: Any
    rule: ValueRule


def is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def are_numbers(value: object, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(map(is_finite_number, value))


BOOL = ValueRule("true or false", lambda value: isinstance(value, bool))
NON_NEGATIVE = ValueRule("a number of at least 0", lambda value: is_finite_number(value) and value >= 0)
POSITIVE = ValueRule("a number greater than 0", lambda value: is_finite_number(value) and value > 0)
NON_POSITIVE = ValueRule("a number of at most 0", lambda value: is_finite_number(value) and value <= 0)
AT_LEAST_1 = ValueRule("a number of at least 1", lambda value: is_finite_number(value) and value >= 1)
UNIT_INTERVAL = ValueRule("a number from 0 to 1", lambda value: is_finite_number(value) and 0 <= value <= 1)
UNIT_INTERVAL_BELOW_1 = ValueRule(
    "a number of at least 0 and less than 1", lambda value: is_finite_number(value) and 0 <= value < 1
)
BETAS = ValueRule(
    "two numbers of at least 0 and less than 1",
    lambda value: are_numbers(value, 2) and all(0 <= beta < 1 for beta in value),
)
ETAS = ValueRule(
    "two numbers, the first between 0 and 1 and the second greater than 1",
    lambda value: are_numbers(value, 2) and 0 < value[0] < 1 < value[1],
)
STEP_SIZES = ValueRule(
    "two numbers greater than 0, the smaller first",
    lambda value: are_numbers(value, 2) and 0 < value[0] <= value[1],
)
EPS_PAIR = ValueRule(
    "two numbers of at least 0; the first may be null",
    lambda value: (
        isinstance(value, list | tuple)
        and are_numbers([0 if item is None and index == 0 else item for index, item in enumerate(value)], 2)
        and all(item is None or item >= 0 for item in value)
    ),
)
THREE_NUMBERS = ValueRule("three numbers", lambda value: are_numbers(value, 3))
NS_STEPS = ValueRule(
    "an integer from 1 to 99",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 99,
)
ADJUST_LR_FNS = ("original", "match_rms_adamw", "spectral_unclamped")
ADJUST_LR_FN = ValueRule(f"one of {', '.join(ADJUST_LR_FNS)}", lambda value: value in ADJUST_LR_FNS)

# Options with their own config key. An option of the same name but with another rule belongs in optim.options.
COMMON_OPTIONS = {
    "momentum": UNIT_INTERVAL_BELOW_1,
    "nesterov": BOOL,
    "betas": BETAS,
    "eps": POSITIVE,
    "weight_decay": NON_NEGATIVE,
}

# Constructor arguments that optim.options cannot set. gputrain sets the parameters, the learning rate (optim.lr) and
# the implementation (foreach, fused). The others keep torch's defaults.
RESERVED_ARGUMENTS = {"params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"}

_DECAY = OptimizerOption(0, NON_NEGATIVE)
_BETAS = OptimizerOption((0.9, 0.999), BETAS)
_EPS = OptimizerOption(1e-8, POSITIVE)
_FALSE = OptimizerOption(False, BOOL)

# torch's optimizers with torch's defaults.
OPTIMIZERS: dict[str, dict[str, OptimizerOption]] = {
    "sgd": {
        "momentum": OptimizerOption(0, UNIT_INTERVAL_BELOW_1),
        "dampening": OptimizerOption(0, UNIT_INTERVAL),
        "weight_decay": _DECAY,
        "nesterov": _FALSE,
    },
    "adam": {
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "amsgrad": _FALSE,
        "decoupled_weight_decay": _FALSE,
    },
    "adamw": {"betas": _BETAS, "eps": _EPS, "weight_decay": OptimizerOption(0.01, NON_NEGATIVE), "amsgrad": _FALSE},
    "nadam": {
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum_decay": OptimizerOption(0.004, NON_NEGATIVE),
        "decoupled_weight_decay": _FALSE,
    },
    "radam": {"betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY, "decoupled_weight_decay": _FALSE},
    "rmsprop": {
        "alpha": OptimizerOption(0.99, UNIT_INTERVAL_BELOW_1),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum": OptimizerOption(0, UNIT_INTERVAL_BELOW_1),
        "centered": _FALSE,
    },
    "adagrad": {
        "lr_decay": OptimizerOption(0, NON_NEGATIVE),
        "weight_decay": _DECAY,
        "initial_accumulator_value": OptimizerOption(0, NON_NEGATIVE),
        "eps": OptimizerOption(1e-10, POSITIVE),
    },
    "adadelta": {
        "rho": OptimizerOption(0.9, UNIT_INTERVAL),
        "eps": OptimizerOption(1e-6, POSITIVE),
        "weight_decay": _DECAY,
    },
    "adamax": {"betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY},
    "asgd": {
        "lambd": OptimizerOption(1e-4, NON_NEGATIVE),
        "alpha": OptimizerOption(0.75, NON_NEGATIVE),
        "t0": OptimizerOption(1e6, NON_NEGATIVE),
        "weight_decay": _DECAY,
    },
    "rprop": {"etas": OptimizerOption((0.5, 1.2), ETAS), "step_sizes": OptimizerOption((1e-6, 50), STEP_SIZES)},
    "adafactor": {
        "beta2_decay": OptimizerOption(-0.8, NON_POSITIVE),
        "eps": OptimizerOption((None, 1e-3), EPS_PAIR),
        "d": OptimizerOption(1.0, AT_LEAST_1),
        "weight_decay": _DECAY,
    },
    # betas are those of the AdamW that updates the parameters which Muon does not.
    "muon": {
        "weight_decay": OptimizerOption(0.1, NON_NEGATIVE),
        "momentum": OptimizerOption(0.95, UNIT_INTERVAL_BELOW_1),
        "nesterov": OptimizerOption(True, BOOL),
        "ns_coefficients": OptimizerOption((3.4445, -4.775, 2.0315), THREE_NUMBERS),
        "eps": OptimizerOption(1e-7, POSITIVE),
        "ns_steps": OptimizerOption(5, NS_STEPS),
        "adjust_lr_fn": OptimizerOption(None, ADJUST_LR_FN),
        "betas": _BETAS,
    },
}

# Defaults that differ from torch's. SGD is rarely used without momentum. Muon shares optim.lr with the AdamW for the
# other parameters, which requires this adjustment (Liu et al., Muon is Scalable for LLM Training, 2025).
DEFAULT_OVERRIDES: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "muon": {"adjust_lr_fn": "match_rms_adamw"}}

# Weight-sized state tensors of an optimizer without momentum. All others, and most of timm's, keep two like Adam.
_STATE_COPIES = {"sgd": 0, "rmsprop": 1, "adagrad": 1, "asgd": 1, "adafactor": 1}


def accepts_key(options: Mapping[str, OptimizerOption], key: str) -> bool:
    """Whether an optimizer with these options supports the config key `optim.KEY`."""
    return key in options and options[key].rule is COMMON_OPTIONS[key]


def optimizers_accepting(key: str) -> set[str]:
    """Names of torch's optimizers that support the config key `optim.KEY`."""
    return {name for name, options in OPTIMIZERS.items() if accepts_key(options, key)}


def default_options(name: str) -> dict[str, Any]:
    """Default of each optimizer-specific config key, including `options`; of timm's optimizers only that of `lr`."""
    options = OPTIMIZERS.get(name, {})
    values = {key: option.default for key, option in options.items()} | DEFAULT_OVERRIDES.get(name, {})
    common = {key: values.pop(key) for key in COMMON_OPTIONS if accepts_key(options, key)}
    return {"lr": default_lr(name)} | common | ({"options": values} if values else {})


def optimizer_kwargs(
    optim: OptimConfig, options: Mapping[str, OptimizerOption], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Constructor arguments of the optimizer except parameters and learning rate: `defaults` updated by the config."""
    common = {key: getattr(optim, key) for key in COMMON_OPTIONS if accepts_key(options, key)}
    set_keys = {key: value for key, value in common.items() if value is not None}
    extra = {key: tuple(value) if isinstance(value, list) else value for key, value in optim.options.items()}
    return {**defaults, **set_keys, **extra}


def option_problems(optim: OptimConfig, options: Mapping[str, OptimizerOption]) -> Iterator[Problem]:
    """Yield a problem for each entry of `optim.options` that an optimizer with these `options` does not support.

    Keys that it does not support have no effect, see `engine.config.effects`."""
    others = ("optim.name",)
    extra_keys = [key for key in options if not (key in COMMON_OPTIONS and accepts_key(options, key))]
    for key, value in optim.options.items():
        if key in COMMON_OPTIONS and accepts_key(options, key):
            yield Problem(
                "optim.options", f"{key} has its own config key; use optim.{key}", others=others, code="unknown-key"
            )
        elif key not in extra_keys:
            available = f"it has {', '.join(extra_keys)}" if extra_keys else "it has no options"
            reason = f"{optim.name} has no option {key!r}; {available}{did_you_mean(key, extra_keys)}"
            yield Problem("optim.options", reason, others=others, code="unknown-key")
        elif not options[key].rule.is_valid(value):
            reason = f"{key} must be {options[key].rule.allowed}, not {_short_repr(value)}"
            yield Problem("optim.options", reason, others=others, code="invalid-value")


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def torch_optimizer_problems(optim: OptimConfig) -> Iterator[Problem]:
    """Yield the problems of a torch optimizer's config; nothing for timm's, whose options are not in this table."""
    if optim.name not in OPTIMIZERS:
        return
    yield from option_problems(optim, OPTIMIZERS[optim.name])
    if optim.name == "sgd" and optim.nesterov:
        if optim.momentum == 0:
            reason = "needs optim.momentum greater than 0"
            yield Problem("optim.nesterov", reason, others=("optim.name", "optim.momentum"), code="needs-key")
        if optim.options.get("dampening"):
            reason = "dampening must be 0 with optim.nesterov=true"
            yield Problem("optim.options", reason, others=("optim.name", "optim.nesterov"), code="conflict")


def state_copies(optim: OptimConfig) -> int:
    """Number of weight-sized state tensors that the optimizer keeps, rounded up."""
    copies = _STATE_COPIES.get(optim.name, 2)
    momentum = DEFAULT_OVERRIDES.get(optim.name, {}).get("momentum") if optim.momentum is None else optim.momentum
    if optim.name in ("sgd", "rmsprop") and momentum:
        copies += 1
    return copies + sum(optim.options.get(key) is True for key in ("amsgrad", "centered"))
