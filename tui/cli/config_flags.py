"""The options of config keys, made from `tui.flags`, and how typed words become a config.

A command that trains takes all of them: `@config_flags()` puts them in place of its parameter `flags`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tui.cli.command import Callback, expand_parameter
from tui.cli.completions import complete_choices, complete_runs
from tui.cli.help_page import CONFIG_OPTIONS
from tui.flags import BOOLEAN_FLAGS, FLAG_METAVARS, FLAG_TO_KEY

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
    from engine.utils.errors import UsageError

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
