"""A command before typer builds it, and the decorators' way to give a function the options that belong together.

`tui.cli.tree` says where each command is, `tui.cli.help` builds it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any, get_type_hints

from tui.cli.help import HelpCommand
from tui.cli.help_page import make_epilog

Callback = Callable[..., None]


@dataclass(frozen=True)
class Subcommand:
    """A function whose parameters are the arguments and options of a command, its class, and parts of its help."""

    callback: Callback
    kind: type[HelpCommand]
    examples: Sequence[str]
    epilog: str


def command(
    examples: Sequence[str],
    *notes: str,
    exit_codes: Mapping[int, str] | None = None,
    kind: type[HelpCommand] = HelpCommand,
) -> Callable[[Callback], Subcommand]:
    """Make a function a command. Its docstring is the help; it may raise UsageError, which becomes exit code 2."""

    def make(callback: Callback) -> Subcommand:
        return Subcommand(callback, kind, examples, make_epilog(callback.__doc__, *notes, exit_codes=exit_codes))

    return make


def expand_parameter(
    function: Callback,
    name: str,
    parameters: Mapping[str, tuple[Any, Any]],
    combine: Callable[[dict[str, Any]], Any],
) -> Callback:
    """Return a function with these parameters, by annotation and default, in place of `name`.

    It calls `function` with what `combine` makes of their values.
    """

    @functools.wraps(function)
    def expanded(**values: Any) -> None:
        combined = combine({key: values.pop(key) for key in parameters})
        function(**values, **{name: combined})

    kind, shown = inspect.Parameter.KEYWORD_ONLY, list[inspect.Parameter]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name != name:
            shown.append(parameter.replace(kind=kind, annotation=_annotation(function, parameter)))
            continue
        for key, (annotation, default) in parameters.items():
            shown.append(inspect.Parameter(key, kind, annotation=annotation, default=default))
    expanded.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # typer reads it
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return expanded


def takes(name: str, group: type[Any], only: Collection[str] = ()) -> Callable[[Callback], Callback]:
    """Replace the parameter `name` by the options that are the fields of a dataclass. With `only` some of them, the
    others keep their defaults."""
    hints = get_type_hints(group, include_extras=True)
    kept = [each for each in fields(group) if each.name in only or not only]
    # A list has no default here: typer has None for one without words.
    parameters = {each.name: (hints[each.name], None if each.default is MISSING else each.default) for each in kept}

    def combine(values: dict[str, Any]) -> Any:
        return group(**{key: value for key, value in values.items() if value is not None})

    return functools.partial(expand_parameter, name=name, parameters=parameters, combine=combine)


def _annotation(function: Callback, parameter: inspect.Parameter) -> Any:
    """Return the annotation of a parameter; those of other parameters may be imported for type checks only."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    own = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    return get_type_hints(own, function.__globals__, include_extras=True)[parameter.name]
