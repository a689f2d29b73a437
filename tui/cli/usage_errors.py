"""Usage errors of typer in one line, like those of gputrain: what is wrong, the nearest name, where the help is.

The command classes of `tui.cli.help` parse their arguments within `one_line_usage_errors`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from engine.base.errors import Problem, UsageError, did_you_mean
from tui.cli.console import exit_on_usage_error
from tui.cli.tree import COMMANDS, RESULTS, RUNS, WORDS
from tui.form.flags import FLAG_TO_KEY

# typer exports only this subclass of the error.
TyperUsageError: type[Any] = typer.BadParameter.__mro__[1]

# What some examples say behind the command.
EXAMPLE_NOTE = re.compile("   +.*")
NOT_A_CHOICE = re.compile("'(.*)' is not one of (.*)")


@contextmanager
def one_line_usage_errors() -> Iterator[None]:
    """Print a usage error of typer as one line and exit with code 2."""
    try:
        yield
    except TyperUsageError as error:
        if type(error).show is not TyperUsageError.show:
            # It shows something else: the help page of a command without arguments.
            raise

        with exit_on_usage_error():
            raise UsageError([_to_problem(error)]) from error


def _to_problem(error: Any) -> Problem:
    """Return the problem that an error of typer describes."""

    context, param = error.ctx, getattr(error, "param", None)
    advice = _help_advice(context) if context is not None else ""
    if hasattr(error, "possibilities"):
        return _unknown_option_problem(error.option_name, context, advice)
    if param is None:
        return Problem("", _as_clause(error.format_message()), advice, code="invalid-value")
    location = param.metavar.split()[0] if param.param_type_name == "argument" else param.opts[0]
    if not error.message:
        return Problem(location, "is missing", _example_of(context, advice), code="missing-value")
    if (refused := NOT_A_CHOICE.search(error.message)) is not None:
        word, choices = refused[1], re.findall("'(.*?)'", refused[2])
        reason = f"{word} is not allowed: must be one of {', '.join(choices)}{did_you_mean(word, choices)}"
        return Problem(location, reason, code="unknown-value")
    return Problem(location, _as_clause(error.message), advice, code="invalid-value")


def _unknown_option_problem(option: str, context: Any, advice: str) -> Problem:
    """Return the problem of an option that a command does not have: what was meant, or what it sets elsewhere."""

    known = [name for each in context.command.get_params(context) for name in (*each.opts, *each.secondary_opts)]
    key = FLAG_TO_KEY.get(option.removeprefix("--").replace("-", "_"))
    word = _words(context)[:1]
    if key is not None and (word == ["sweep"] or (word and WORDS[word[0]].panel in (RUNS, RESULTS))):
        reason = f"has no effect on {context.command_path}: it sets {key} of a training"
        return Problem(option, reason, advice, code="unknown-option")
    hint = _key_option_hint(option, context.command, known) or did_you_mean(option, known)
    return Problem(option, f"there is no such option{hint}", "" if hint else advice, code="unknown-option")


def _words(context: Any) -> list[str]:
    """Return the words of a command behind `gputrain`, or behind `python -m tui`."""
    return str(context.command_path).removeprefix(context.find_root().command_path).split()


def _key_option_hint(option: str, command: Any, known: list[str]) -> str:
    """Return a hint at the option of the config key that a command may set and an unknown option names."""
    if not takes_config_keys(command):
        return ""
    from engine.config.key_names import find_keys

    flags = {key: f"--{flag.replace('_', '-')}" for flag, key in FLAG_TO_KEY.items()}
    names = [flags[key] if flags.get(key) in known else f"--{key}" for key in find_keys(option.lstrip("-"))]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def bare_key(option: str, context: Any) -> str:
    """Return the config key that an option names without its section, such as --weight-decay; "" if the command has
    that option, or options for the key, or if it is ambiguous."""
    command = context.command
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    if not option.startswith("--") or option in known:
        return ""
    from engine.config.schema import fields

    name = option.removeprefix("--").replace("-", "_")
    found = [key for key, _ in fields() if key.partition(".")[2] == name and key not in FLAG_TO_KEY.values()]
    return found[0] if len(found) == 1 else ""


def takes_config_keys(command: Any) -> bool:
    """Whether the arguments of a command may be `section.key=value`, or a search space."""
    return any(param.param_type_name == "argument" and "[KEY=" in (param.metavar or "") for param in command.params)


def _example_of(context: Any, advice: str) -> str:
    """Return what to type where an argument is missing: the first example of the command."""
    examples = getattr(context.command, "examples", ())
    return f"type one, as in `{EXAMPLE_NOTE.sub('', examples[0])}`" if examples else advice


def _help_advice(context: Any) -> str:
    """Return where the help is: that of a group shows the options of its default command."""
    is_default = getattr(getattr(context.parent, "command", None), "default", None) == context.info_name
    return f"see `{(context.parent if is_default else context).command_path} --help`"


def _as_clause(sentence: str) -> str:
    """Return a sentence of typer as a clause."""
    sentence = sentence.removeprefix("Value error, ").partition(", unable to parse ")[0]
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def unknown_command_problem(name: str, context: Any, commands: list[str], rest: Sequence[str] = ()) -> Problem:
    """Return the problem of a command that does not exist. `rest` is what follows it, for the command that is meant."""

    # The command of a group: `gputrain tag` means `gputrain runs tag`.
    inner = [
        f"`{shlex.join(('gputrain', *command.split(), *rest))}`" for command in COMMANDS if command.endswith(f" {name}")
    ]
    nearest = f"; did you mean {' or '.join(inner)}?" if inner else did_you_mean(name, commands)
    advice = "" if nearest else _help_advice(context)
    return Problem(name, f"there is no such command{nearest}", advice, code="unknown-command")
