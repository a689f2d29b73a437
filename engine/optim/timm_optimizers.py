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
from engine.config.training_sections import OptimConfig
from engine.utils.errors import Problem, UsageError, did_you_mean, not_installed
from engine.utils.files import cache_folder, read_json, write_json
from engine.utils.helper_process import HelperError, ParentPipe, ask_helper

TIMM_PREFIX = "timm:"


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
    known = _catalog()
    plain = name.removeprefix(TIMM_PREFIX)
    if plain.startswith("lookahead_"):
        raise UsageError.one("optim.name", f"{name}: timm's lookahead wrapper is not supported")
    if plain not in known:
        usable = [TIMM_PREFIX + one for one, about in known.items() if "options" in about]
        hint = did_you_mean(name, usable) or f"; choose from {', '.join(usable)}"
        raise UsageError.one("optim.name", f"timm has no optimizer {plain!r}{hint}")
    if "refused" in known[plain]:
        raise UsageError.one("optim.name", f"{name} cannot be used: it {known[plain]['refused']}")
    return {key: _option_from_default(key, **about) for key, about in known[plain]["options"].items()}


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
        raise UsageError.one("optim.name", not_installed("timm")) from error
    path = cache_folder() / f"optimizers-timm-{installed}.json"
    stored = read_json(path)
    if stored is not None and isinstance(stored.get("optimizers"), dict):
        return dict(stored["optimizers"])
    try:
        known: dict[str, Any] = ask_helper("engine.optim.timm_optimizers")
    except HelperError as error:
        raise UsageError.one("optim.name", f"timm's optimizers cannot be listed: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"optimizers": known})
    except OSError:
        # Without a cache, the next call starts the helper process again.
        return known
    return known


def main(parent: ParentPipe) -> None:
    """Entry point of the helper process, which imports timm."""
    parent.send(describe_optimizers())


def describe_optimizers() -> dict[str, Any]:
    """Map each of timm's optimizers to its options, or to the reason why it is not supported. Imports timm."""
    from timm.optim import get_optimizer_info, list_optimizers

    found: dict[str, Any] = {}
    for name in map(str, list_optimizers()):
        about = get_optimizer_info(name)
        if isinstance(about.opt_class, str):
            found[name] = {"refused": f"needs {about.opt_class.split('.')[0]}, which is not supported"}
        elif about.second_order:
            found[name] = {"refused": "needs second derivatives of the loss, which a plain step does not have"}
        elif about.opt_class.__name__ == "Kron":
            found[name] = {
                "refused": "draws random numbers that checkpoints do not save, so a resumed run would differ"
            }
        else:
            found[name] = {"options": _optimizer_parameters(about)}
    return found


def _optimizer_parameters(info: Any) -> dict[str, Any]:
    """Return default and optionality of each option; `info` is timm's OptimInfo."""
    found = {}
    for key, parameter in inspect.signature(info.opt_class).parameters.items():
        if key in RESERVED_ARGUMENTS:
            continue
        default = (info.defaults or {}).get(key, parameter.default)
        if key == "momentum" and not default:
            # The default of timm's `create_optimizer_v2`.
            default = 0.9
        optional = "None" in str(parameter.annotation) or "Optional" in str(parameter.annotation)
        found[key] = {"default": default if _is_serializable(default) else None, "optional": optional}
    return found


def _is_serializable(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple | None)
