"""Names and options of timm's optimizers, without importing timm in the calling process.

A helper process imports timm and describes its optimizers; the result is cached per timm version in the user's cache
folder. `optimizers` and `engine.launch.preflight` call this module.
"""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.config.optimizer_options import (
    BOOL,
    COMMON_OPTIONS,
    RESERVED_ARGUMENTS,
    OptimizerOption,
    ValueRule,
    are_numbers,
    is_finite_number,
    option_problems,
)
from engine.config.training_sections import TIMM_PREFIX, OptimConfig
from engine.utils.answers import Answer
from engine.utils.errors import Problem, UsageError, did_you_mean, not_installed
from engine.utils.files import cache_folder, read_user_json, write_user_json
from engine.utils.helper_process import HelperError, ParentPipe, ask_helper
from engine.utils.libraries import import_library


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
    catalog = _catalog()
    timm_name = name.removeprefix(TIMM_PREFIX)
    if timm_name.startswith("lookahead_"):
        raise UsageError.one("optim.name", f"{name}: timm's lookahead wrapper is not supported", code="not-supported")
    if timm_name not in catalog:
        usable = _usable_names(catalog)
        hint = did_you_mean(name, usable) or f"; choose from {', '.join(usable)}"
        raise UsageError.one("optim.name", f"timm has no optimizer {timm_name!r}{hint}", code="unknown-value")
    if "refused" in catalog[timm_name]:
        raise UsageError.one(
            "optim.name", f"{name} cannot be used: it {catalog[timm_name]['refused']}", code="not-supported"
        )
    return {key: _option_from_default(key, **entry) for key, entry in catalog[timm_name]["options"].items()}


def timm_optimizer_names() -> list[str]:
    """Return the values of `optim.name` that select an optimizer of timm; none if timm is missing or broken."""
    try:
        return _usable_names(_catalog())
    except UsageError:
        return []


def _usable_names(catalog: dict[str, Any]) -> list[str]:
    return [
        TIMM_PREFIX + name
        for name, entry in catalog.items()
        if "options" in entry and not name.startswith("lookahead_")
    ]


def _option_from_default(key: str, default: Any, optional: bool) -> OptimizerOption:
    """Derive the allowed values of an option from its default; the optimizer itself validates the rest."""
    common = COMMON_OPTIONS.get(key)
    if common is not None and (default is None or common.is_valid(default) or default == 0):
        return OptimizerOption(default, common)
    if isinstance(default, bool):
        rule = BOOL
    elif is_finite_number(default):
        rule = ValueRule("a number", is_finite_number)
    elif isinstance(default, list) and are_numbers(default, len(default)):
        count = len(default)
        rule = ValueRule(f"{count} numbers", lambda value: are_numbers(value, count))
    else:
        rule = ValueRule("a value that timm accepts", lambda value: True)
    if optional:
        return OptimizerOption(
            default, ValueRule(f"{rule.allowed}, or null", lambda value: value is None or rule.is_valid(value))
        )
    return OptimizerOption(default, rule)


def _catalog() -> dict[str, Any]:
    try:
        installed = version("timm")
    except PackageNotFoundError as error:
        raise UsageError.one("optim.name", not_installed("timm"), code="not-installed") from error
    name = f"optimizers-timm-{installed}.json"
    cached = read_user_json(cache_folder(), name)
    if cached is not None and _is_catalog(cached.get("optimizers")):
        return dict(cached["optimizers"])
    try:
        answer = ask_helper("engine.optim.timm_optimizers", Answer[dict[str, Any]])
    except HelperError as error:
        raise UsageError.one(
            "optim.name", f"timm's optimizers cannot be listed: {error}", code="library-failed"
        ) from error
    catalog = answer.get()
    try:
        write_user_json(cache_folder(), name, {"optimizers": catalog})
    except OSError:
        # Without a cache, the next call starts the helper process again.
        return catalog
    return catalog


def _is_catalog(value: object) -> bool:
    """Whether a value has the structure that `describe_optimizers` returns."""
    return isinstance(value, dict) and all(
        isinstance(entry, dict)
        and (isinstance(entry.get("refused"), str) if "refused" in entry else _are_options(entry.get("options")))
        for entry in value.values()
    )


def _are_options(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(option, dict) and option.keys() == {"default", "optional"} for option in value.values()
    )


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process, which imports timm: send its optimizers, or the problems of the import."""
    try:
        import_library("timm.optim", "optim.name")
    except UsageError as error:
        parent.send(Answer.refuse(error))
        return
    parent.send(Answer(describe_optimizers()))


def describe_optimizers() -> dict[str, Any]:
    """Map each of timm's optimizers to its options, or to the reason why it is not supported. Imports timm."""
    from timm.optim import get_optimizer_info, list_optimizers

    catalog: dict[str, Any] = {}
    for name in map(str, list_optimizers()):
        info = get_optimizer_info(name)
        if isinstance(info.opt_class, str):
            catalog[name] = {"refused": f"needs {info.opt_class.split('.')[0]}, which is not supported"}
        elif info.second_order:
            catalog[name] = {"refused": "needs second derivatives of the loss, which a plain step does not have"}
        elif info.opt_class.__name__ == "Kron":
            catalog[name] = {
                "refused": "draws random numbers that checkpoints do not save, so a resumed run would differ"
            }
        else:
            catalog[name] = {"options": _optimizer_parameters(info)}
    return catalog


def _optimizer_parameters(info: Any) -> dict[str, Any]:
    """Return default and optionality of each option; `info` is timm's OptimInfo."""
    options = {}
    for key, parameter in inspect.signature(info.opt_class).parameters.items():
        if key in RESERVED_ARGUMENTS:
            continue
        default = (info.defaults or {}).get(key, parameter.default)
        if key == "momentum" and not default:
            # The default of timm's `create_optimizer_v2`.
            default = 0.9
        optional = "None" in str(parameter.annotation) or "Optional" in str(parameter.annotation)
        options[key] = {"default": default if _is_serializable(default) else None, "optional": optional}
    return options


def _is_serializable(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple | None)
