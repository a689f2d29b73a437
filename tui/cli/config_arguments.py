"""CONFIG and KEY=VALUE: how typed words become a config, and whose code it may run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.base.errors import UsageError
from tui.cli.command import Callback, expand_parameter
from tui.cli.completions import complete_choices, complete_config, complete_keys, complete_runs
from tui.cli.console import print_warning
from tui.cli.help_page import CONFIG_OPTIONS
from tui.form.flags import BOOLEAN_FLAGS, FLAG_METAVARS, FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.config.code_trust import CodeTrust
    from engine.config.loader import ResolvedConfig


FlagValue = str | bool | tuple[str, ...]
"""A value as typed, or one that needs no parsing."""
FlagOverrides = dict[str, tuple[str, FlagValue]]
"""Config key to the option as typed and its value."""


def config_flags(*names: str) -> Callable[[Callback], Callback]:
    """Replace the parameter `flags: FlagOverrides` of a command by the options of these config flags, by default all.

    `gpus` comes with --ngpu, and `after` with --after-any. A pair that contradicts itself is a UsageError.
    """
    parameters = {name: pair for flag in names or FLAG_TO_KEY for name, pair in _parameters(flag).items()}
    return lambda function: expand_parameter(function, "flags", parameters, _overrides)


def _parameters(flag: str) -> dict[str, tuple[Any, Any]]:
    """Return the parameters of a flag, by name: annotation and default."""
    if flag in BOOLEAN_FLAGS:
        return {flag: (Annotated[bool, _option(flag, None)], False)}
    if flag == "after":
        after_any = _option("after_any", "RUN", "Like --after, however the run ends.")
        kind = list[str] | None
        return {
            "after": (Annotated[kind, _option("after", "RUN")], None),
            "after_any": (Annotated[kind, after_any], None),
        }
    found: dict[str, tuple[Any, Any]] = {flag: (Annotated[str | None, _option(flag, FLAG_METAVARS[flag])], None)}
    if flag == "gpus":
        help_text = "Shorthand for --gpus free:N; 0 means --gpus cpu."
        found["ngpu"] = (Annotated[int | None, _option("ngpu", "N", help_text, min=0)], None)
    return found


def _option(name: str, metavar: str | None, help_text: str | None = None, **settings: Any) -> Any:
    # The help of a key is read from the schema when it is shown.
    complete = complete_runs if metavar == "RUN" else None if name in BOOLEAN_FLAGS else complete_choices(name)
    return typer.Option(
        _typed(name),
        metavar=metavar,
        help=help_text,
        rich_help_panel=CONFIG_OPTIONS,
        autocompletion=complete,
        **settings,
    )


def _typed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _overrides(values: dict[str, Any]) -> FlagOverrides:
    """Return the overrides of typed values. Raises UsageError if --ngpu and --gpus disagree."""
    ngpu = values.pop("ngpu", None)
    after, after_any = values.pop("after", None), values.pop("after_any", None)
    flags: FlagOverrides = {}
    for name, value in values.items():
        if value in (None, False):
            continue
        flags[FLAG_TO_KEY[name]] = (_typed(name) if value is True else f"{_typed(name)} {value}", value)
    if ngpu is not None:
        flags[FLAG_TO_KEY["gpus"]] = (f"--ngpu {ngpu}", _selection(ngpu, values["gpus"]))
    if references := _references(after, after_any):
        flags[FLAG_TO_KEY["after"]] = (f"--after {','.join(references)}", references)
    return flags


def _selection(ngpu: int, gpus: str | None) -> str:
    """Return what --ngpu means. Raises UsageError if --gpus says something else."""
    selection = f"free:{ngpu}" if ngpu else "cpu"
    if gpus not in (None, selection):
        raise UsageError.one(
            "--ngpu", f"means --gpus {selection}, but --gpus {gpus} is also set; keep one", code="conflict"
        )
    return selection


def _references(after: list[str] | None, after_any: list[str] | None) -> tuple[str, ...]:
    """Return the runs of `--after a,b --after c`; those of --after-any are marked."""
    from engine.config.queue_section import ANY_END

    def split(options: list[str] | None) -> list[str]:
        return [part.strip() for option in options or [] for part in option.split(",") if part.strip()]

    return (*split(after), *(f"{name}{ANY_END}" for name in split(after_any))) if after or after_any else ()


def print_no_effect(resolved: ResolvedConfig) -> None:
    """Print a warning for each key of a config that is set and has no effect."""
    for _, warning in resolved.no_effect:
        print_warning(warning)


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """Split the arguments into CONFIG (or None) and the `section.key=value` overrides.

    Raises UsageError if there is more than one CONFIG, or a key without a value.
    """
    from engine.config.schema import fields

    overrides = [argument for argument in arguments or [] if is_override(argument)]
    files = [argument for argument in arguments or [] if not is_override(argument)]
    if bare_keys := [file for file in files if file in dict(fields())]:
        raise UsageError.one(
            bare_keys[0], f"is a config key and needs a value: {bare_keys[0]}=VALUE", code="missing-value"
        )
    if len(files) > 1:
        raise UsageError.one(
            files[1],
            f"is a second CONFIG after {files[0]}; keep one, and set values as section.key=value",
            code="too-many",
        )
    return (files[0] if files else None), overrides


def is_override(argument: str) -> bool:
    """Return whether the argument is `section.key=value` rather than a path that contains an equals sign."""
    return "/" not in argument.partition("=")[0] and "=" in argument


def resolve_arguments(
    arguments: list[str] | None,
    flags: FlagOverrides | None = None,
    *,
    trust_code: bool = False,
    **options: Any,
) -> ResolvedConfig:
    """Resolve CONFIG, overrides and flags to a config; `options` are those of `resolve_config`.

    Raises UsageError with every problem found."""
    from engine.config.loader import resolve_config

    file, overrides = split_arguments(arguments)
    return resolve_config(file, overrides, flags, trust_code=trust_code, **options)


def code_trust(resolved: ResolvedConfig, *, granted: bool) -> CodeTrust:
    """Return whose code a resolved config may name; what runs only because of --trust-code is printed on stderr."""
    return replace(trust_option(granted=granted), foreign=resolved.foreign_code)


def trust_option(*, granted: bool) -> CodeTrust:
    """Return what --trust-code grants. Each of its messages is printed once, although several steps check the code."""
    from engine.config.code_trust import CodeTrust

    return CodeTrust(granted, notify=functools.cache(print_warning))


# `tui.cli.help` prints one line for each word of the metavar.
KEY_HELP = "Any config key: optim.momentum=0.8 or --momentum 0.8."
CONFIG_HELP = f"YAML file, preset such as digits, image folder or CSV file.\n{KEY_HELP}"
ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help=CONFIG_HELP, autocompletion=complete_config),
]
ChangesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help=KEY_HELP, autocompletion=complete_keys)
]
