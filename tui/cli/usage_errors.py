"""Usage errors of typer in one line, like those of gputrain: what is wrong, the nearest name, where the help is.

The command classes of `tui.cli.help` parse their arguments within `one_line_usage_errors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from tui.cli.arguments import exit_on_usage_error
from tui.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.utils.errors import Problem

# typer exports only this subclass of the error.
TyperUsageError: type[Any] = typer.BadParameter.__mro__[1]


@contextmanager
def one_line_usage_errors() -> Iterator[None]:
    """Print a usage error of typer as one line and exit with code 2."""
    try:
        yield
    except TyperUsageError as error:
        if type(error).show is not TyperUsageError.show:
            # It shows something else: the help page of a command without arguments.
            raise
        from engine.utils.errors import UsageError

        with exit_on_usage_error():
            raise UsageError([_to_problem(error)]) from error


def _to_problem(error: Any) -> Problem:
    """Return the problem that an error of typer describes."""
    from engine.utils.errors import Problem, did_you_mean

    context, param = error.ctx, getattr(error, "param", None)
    advice = _help_advice(context) if context is not None else ""
    if param is not None:
        location = param.metavar.split()[0] if param.param_type_name == "argument" else param.opts[0]
        if not error.message:
            return Problem(location, "is missing", advice, code="missing-value")
        return Problem(location, _as_clause(error.message), advice, code="invalid-value")
    if hasattr(error, "possibilities"):
        known = [name for each in context.command.get_params(context) for name in (*each.opts, *each.secondary_opts)]
        hint = _key_option_hint(error.option_name, context.command, known) or did_you_mean(error.option_name, known)
        return Problem(
            error.option_name, f"there is no such option{hint}", "" if hint else advice, code="unknown-option"
        )
    return Problem("", _as_clause(error.format_message()), advice, code="invalid-value")


def _key_option_hint(option: str, command: Any, known: list[str]) -> str:
    """Return a hint at the option of the config key that a command may set and an unknown option names."""
    if not takes_config_keys(command):
        return ""
    from engine.config.key_names import find_keys

    flags = {key: f"--{flag.replace('_', '-')}" for flag, key in FLAG_TO_KEY.items()}
    names = [flags[key] if flags.get(key) in known else f"--{key}" for key in find_keys(option.lstrip("-"))]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def takes_config_keys(command: Any) -> bool:
    """Whether the arguments of a command may be `section.key=value`, or a search space."""
    return any(param.param_type_name == "argument" and "[KEY=" in (param.metavar or "") for param in command.params)


def _help_advice(context: Any) -> str:
    """Return where the help is. A hidden command, which a group runs by default, has that of the group."""
    shown = context.parent if context.command.hidden else context
    return f"see `{shown.command_path} --help`"


def _as_clause(sentence: str) -> str:
    """Return a sentence of typer as a clause."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def unknown_command_problem(name: str, context: Any, commands: list[str]) -> Problem:
    """Return the problem of a command that does not exist."""
    from engine.utils.errors import Problem, did_you_mean

    nearest = did_you_mean(name, commands)
    advice = "" if nearest else _help_advice(context)
    return Problem(name, f"there is no such command{nearest}", advice, code="unknown-command")
