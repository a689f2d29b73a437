"""What each optimizer takes, told without importing torch: names, limits and defaults of its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from engine.config.training_sections import Optim
from engine.utils.errors import Problem, nearest


class Rule(NamedTuple):
    """What a parameter may be, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]


class Option(NamedTuple):
    default: Any
    rule: Rule


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def are_numbers(value: object, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count and all(map(is_number, value))


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
FROM_0 = Rule("a number from 0 up", lambda value: is_number(value) and value >= 0)
ABOVE_0 = Rule("a number greater than 0", lambda value: is_number(value) and value > 0)
UP_TO_0 = Rule("a number up to 0", lambda value: is_number(value) and value <= 0)
FROM_1 = Rule("a number from 1 up", lambda value: is_number(value) and value >= 1)
SHARE = Rule("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
BELOW_1 = Rule("a number of at least 0 and less than 1", lambda value: is_number(value) and 0 <= value < 1)
BETAS = Rule(
    "two numbers of at least 0 and less than 1",
    lambda value: are_numbers(value, 2) and all(0 <= beta < 1 for beta in value),
)
ETAS = Rule(
    "two numbers, the first between 0 and 1 and the second greater than 1",
    lambda value: are_numbers(value, 2) and 0 < value[0] < 1 < value[1],
)
STEP_SIZES = Rule(
    "two numbers greater than 0, the smaller one first",
    lambda value: are_numbers(value, 2) and 0 < value[0] <= value[1],
)
TWO_EPS = Rule(
    "two numbers from 0 up, the first of which may be null",
    lambda value: (
        isinstance(value, list | tuple)
        and are_numbers([0 if one is None and place == 0 else one for place, one in enumerate(value)], 2)
        and all(one is None or one >= 0 for one in value)
    ),
)
THREE = Rule("three numbers", lambda value: are_numbers(value, 3))
ITERATIONS = Rule(
    "a whole number from 1 to 99",
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 99,
)
ADJUST_LR = ("original", "match_rms_adamw", "spectral_unclamped")
LR_RULE = Rule(f"one of {', '.join(ADJUST_LR)}", lambda value: value in ADJUST_LR)

# Parameters with a config key of their own; of the others an optimizer's own name for something else.
COMMON = {"momentum": BELOW_1, "nesterov": FLAG, "betas": BETAS, "eps": ABOVE_0, "weight_decay": FROM_0}

# Arguments that are not the user's to choose: what is trained, how fast (optim.lr), and how it is computed.
NOT_OPTIONS = {"params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"}

_DECAY = Option(0, FROM_0)
_BETAS = Option((0.9, 0.999), BETAS)
_EPS = Option(1e-8, ABOVE_0)
_OFF = Option(False, FLAG)

# Of torch's optimizers, with torch's defaults.
OPTIMIZERS: dict[str, dict[str, Option]] = {
    "sgd": {"momentum": Option(0, BELOW_1), "dampening": Option(0, SHARE), "weight_decay": _DECAY, "nesterov": _OFF},
    "adam": {
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "amsgrad": _OFF,
        "decoupled_weight_decay": _OFF,
    },
    "adamw": {"betas": _BETAS, "eps": _EPS, "weight_decay": Option(0.01, FROM_0), "amsgrad": _OFF},
    "nadam": {
        "betas": _BETAS,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum_decay": Option(0.004, FROM_0),
        "decoupled_weight_decay": _OFF,
    },
    "radam": {"betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY, "decoupled_weight_decay": _OFF},
    "rmsprop": {
        "alpha": Option(0.99, BELOW_1),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "momentum": Option(0, BELOW_1),
        "centered": _OFF,
    },
    "adagrad": {
        "lr_decay": Option(0, FROM_0),
        "weight_decay": _DECAY,
        "initial_accumulator_value": Option(0, FROM_0),
        "eps": Option(1e-10, ABOVE_0),
    },
    "adadelta": {"rho": Option(0.9, SHARE), "eps": Option(1e-6, ABOVE_0), "weight_decay": _DECAY},
    "adamax": {"betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY},
    "asgd": {
        "lambd": Option(1e-4, FROM_0),
        "alpha": Option(0.75, FROM_0),
        "t0": Option(1e6, FROM_0),
        "weight_decay": _DECAY,
    },
    "rprop": {"etas": Option((0.5, 1.2), ETAS), "step_sizes": Option((1e-6, 50), STEP_SIZES)},
    "adafactor": {
        "beta2_decay": Option(-0.8, UP_TO_0),
        "eps": Option((None, 1e-3), TWO_EPS),
        "d": Option(1.0, FROM_1),
        "weight_decay": _DECAY,
    },
    # And the betas of the AdamW beside it.
    "muon": {
        "weight_decay": Option(0.1, FROM_0),
        "momentum": Option(0.95, BELOW_1),
        "nesterov": Option(True, FLAG),
        "ns_coefficients": Option((3.4445, -4.775, 2.0315), THREE),
        "eps": Option(1e-7, ABOVE_0),
        "ns_steps": Option(5, ITERATIONS),
        "adjust_lr_fn": Option(None, LR_RULE),
        "betas": _BETAS,
    },
}

# Where ours differ from torch's: SGD without momentum is hardly ever meant, and Muon shares its learning rate with the
# AdamW beside it, which it can only with this adjustment (Liu et al., Muon is Scalable for LLM Training, 2025).
OWN_DEFAULTS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "muon": {"adjust_lr_fn": "match_rms_adamw"}}

# Copies of the weights that an optimizer keeps without momentum; the others, and most of timm's, keep two as Adam.
_COPIES = {"sgd": 0, "rmsprop": 1, "adagrad": 1, "asgd": 1, "adafactor": 1}


def takes(options: Mapping[str, Option], key: str) -> bool:
    """Whether an optimizer with these parameters takes the config key `optim.KEY`."""
    return key in options and options[key].rule is COMMON[key]


def takers(key: str) -> set[str]:
    """Names of torch's optimizers that take the config key `optim.KEY`."""
    return {name for name, options in OPTIMIZERS.items() if takes(options, key)}


def defaults_of(name: str) -> dict[str, Any]:
    """What each config key of an optimizer, `options` among them, stands for when left out; nothing for timm's."""
    taken = OPTIMIZERS.get(name, {})
    values = {key: option.default for key, option in taken.items()} | OWN_DEFAULTS.get(name, {})
    common = {key: values.pop(key) for key in COMMON if takes(taken, key)}
    return common | ({"options": values} if values else {})


def settings(optim: Optim, options: Mapping[str, Option], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the optimizer, but for parameters and learning rate; `defaults` where nothing is given."""
    common = {key: getattr(optim, key) for key in COMMON if takes(options, key)}
    given = {key: value for key, value in common.items() if value is not None}
    further = {key: tuple(value) if isinstance(value, list) else value for key, value in optim.options.items()}
    return {**defaults, **given, **further}


def option_problems(optim: Optim, options: Mapping[str, Option]) -> Iterator[Problem]:
    """Each parameter in the config that an optimizer with these `options` cannot take."""
    named = ("optim.name",)
    for key in COMMON:
        # No momentum, no Nesterov and no decay are nothing to take.
        if getattr(optim, key) and not takes(options, key):
            yield Problem(f"optim.{key}", _not_taken(optim.name, key, options), others=named)
    own = [key for key in options if not (key in COMMON and takes(options, key))]
    for key, value in optim.options.items():
        if key in COMMON and takes(options, key):
            yield Problem("optim.options", f"{key} has a key of its own: give optim.{key}", others=named)
        elif key not in own:
            there_are = f"there are {', '.join(own)}" if own else "there are none"
            reason = f"{optim.name} has no parameter {key!r}; {there_are}{nearest(key, own)}"
            yield Problem("optim.options", reason, others=named)
        elif not options[key].rule.holds(value):
            reason = f"{key} must be {options[key].rule.allowed}, not {_shown(value)}"
            yield Problem("optim.options", reason, others=named)


def _not_taken(name: str, key: str, options: Mapping[str, Option]) -> str:
    if key in options:
        return f"{name} takes {options[key].rule.allowed} for its {key}: give it in optim.options"
    others = f"only {', '.join(sorted(takers(key)))} do, and some of timm's"
    none = "0" if key == "weight_decay" else "null"
    return f"{name} does not take it, {others}; leave it out, or give optim.{key}={none}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def torch_problems(optim: Optim) -> Iterator[Problem]:
    """What one of torch's optimizers cannot take; nothing for others, whose parameters are not known here."""
    if optim.name not in OPTIMIZERS:
        return
    yield from option_problems(optim, OPTIMIZERS[optim.name])
    if optim.name == "sgd" and optim.nesterov:
        if optim.momentum == 0:
            reason = "needs optim.momentum greater than 0"
            yield Problem("optim.nesterov", reason, others=("optim.name", "optim.momentum"))
        if optim.options.get("dampening"):
            reason = "dampening must be 0 beside optim.nesterov"
            yield Problem("optim.options", reason, others=("optim.name", "optim.nesterov"))


def state_copies(optim: Optim) -> int:
    """Copies of the weights that the optimizer keeps, rounded up."""
    copies = _COPIES.get(optim.name, 2)
    momentum = OWN_DEFAULTS.get(optim.name, {}).get("momentum") if optim.momentum is None else optim.momentum
    if optim.name in ("sgd", "rmsprop") and momentum:
        copies += 1
    return copies + sum(optim.options.get(key) is True for key in ("amsgrad", "centered"))
