"""Names and options of timm's optimizers, without importing timm in the calling process.

A helper process imports timm and describes its optimizers; the result is cached per timm version in the user's cache
folder. `optimizers` and `engine.jobs.launch.preflight` call this module.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Annotated, Any

from engine.base.answers import Answer
from engine.base.codec import (
    ENTRIES,
    FileRecord,
    Finite,
    Integer,
    InvalidRecordError,
    Record,
    convert,
)
from engine.base.errors import Problem, UsageError, did_you_mean
from engine.base.helper_process import ParentPipe
from engine.base.libraries import cached_listing, import_library
from engine.config.optimizer_options import (
    COMMON_OPTIONS,
    RESERVED_ARGUMENTS,
    OptimizerOption,
    ValueRule,
    option_problems,
)
from engine.config.training_sections import TIMM_PREFIX, OptimConfig

DefaultValue = bool | Integer | Finite | str | tuple[Finite, ...] | None


class TimmOptimizer(Record, frozen=True, kw_only=True):
    """The defaults of an optimizer by option, None also for one that is no plain value. `refused` is why the optimizer
    is not supported, a clause; "" if it is."""

    options: dict[str, DefaultValue]
    refused: str = ""


class TimmOptimizers(FileRecord, frozen=True, kw_only=True):
    """The optimizers of one version of timm by name, in the user's cache."""

    optimizers: Annotated[dict[str, TimmOptimizer], ENTRIES]


def timm_optimizer_problems(optim: OptimConfig) -> list[Problem]:
    """Return the problems of a `timm:NAME` optimizer and its options; none for other optimizers."""
    if not optim.name.startswith(TIMM_PREFIX):
        return []
    try:
        options = timm_options(optim.name)
    except UsageError as error:
        return error.problems
    return list(option_problems(optim, options))


def timm_options(name: str) -> dict[str, OptimizerOption]:
    """Return the options of `timm:NAME`. Raises UsageError if timm lacks the optimizer or it is not supported."""
    listing = cached_listing("optimizers", "timm", "optim.name", TimmOptimizers, "engine.train.optim.timm_optimizers")
    catalog = listing.optimizers
    timm_name = name.removeprefix(TIMM_PREFIX)
    if timm_name.startswith("lookahead_"):
        raise UsageError.one("optim.name", f"{name}: timm's lookahead wrapper is not supported", code="not-supported")
    if timm_name not in catalog:
        plain = [key for key, optimizer in catalog.items() if not (optimizer.refused or key.startswith("lookahead_"))]
        usable = [TIMM_PREFIX + key for key in plain]
        hint = did_you_mean(name, usable) or f"; choose from {', '.join(usable)}"
        raise UsageError.one("optim.name", f"timm has no optimizer {timm_name!r}{hint}", code="unknown-value")
    optimizer = catalog[timm_name]
    if optimizer.refused:
        raise UsageError.one("optim.name", f"{name} cannot be used: it {optimizer.refused}", code="not-supported")
    return {key: _option_from_default(key, option) for key, option in optimizer.options.items()}


def _option_from_default(key: str, default: DefaultValue) -> OptimizerOption:
    """Return the default of an option and the values that its config key allows; the optimizer validates the rest."""
    common = COMMON_OPTIONS.get(key)
    if common is not None and (default is None or common.is_valid(default) or default == 0):
        return OptimizerOption(default, common)
    return OptimizerOption(default, ValueRule("a value that timm accepts", lambda value: True))


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process, which imports timm: send its optimizers, or the problems of the import."""
    parent.send(Answer.of(describe_optimizers))


def describe_optimizers() -> TimmOptimizers:
    """Describe timm's optimizers by name. Raises UsageError if timm cannot be imported."""
    timm_optim, catalog = import_library("timm.optim", "optim.name"), dict[str, TimmOptimizer]()
    for name in map(str, timm_optim.list_optimizers()):
        info = timm_optim.get_optimizer_info(name)
        refused = _refusal(info)
        catalog[name] = TimmOptimizer(options={} if refused else _optimizer_parameters(info), refused=refused)
    return TimmOptimizers(optimizers=catalog)


def _refusal(info: Any) -> str:
    """Return why an optimizer is not supported; "" if it is. `info` is timm's OptimInfo."""
    if isinstance(info.opt_class, str):
        return f"needs {info.opt_class.split('.')[0]}, which is not supported"
    if info.second_order:
        return "needs second derivatives of the loss, which a plain step does not have"
    if info.opt_class.__name__ == "Kron":
        return "draws random numbers that checkpoints do not save, so a resumed run would differ"
    return ""


def _optimizer_parameters(info: Any) -> dict[str, DefaultValue]:
    """Return the default of each option by name; `info` is timm's OptimInfo."""
    options = dict[str, DefaultValue]()
    for key, parameter in inspect.signature(info.opt_class).parameters.items():
        if key in RESERVED_ARGUMENTS:
            continue
        default = (info.defaults or {}).get(key, parameter.default)
        if key == "momentum" and not default:
            # The default of timm's `create_optimizer_v2`.
            default = 0.9
        options[key] = _plain_value(default)
    return options


def _plain_value(default: object) -> DefaultValue:
    with suppress(InvalidRecordError):
        return convert(default, DefaultValue)  # type: ignore[arg-type]  # a union, which type[T] does not include
    return None
