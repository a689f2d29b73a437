"""Read the parameters of a training from the arguments of its command: `--lr 0.1`, `lr=0.1`, `--no-amp`.

They have the names that the trainer's own configuration has, so that runs of a command compare with watched ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from engine.command.inner_commands import LAUNCHER_MODULES, SHELLS, InnerCommand, inner_commands
from engine.foreign.parameters import Parameters, flatten, parse_scalar
from engine.foreign.reading import Scalar, parse_number
from engine.utils.redaction import redact, redact_argv

_OPTION = re.compile(r"--?(?P<name>[A-Za-z_][\w.:/-]*)(?:=(?P<value>.*))?", re.DOTALL)
# `-b32`
_SHORT = re.compile(r"-(?P<name>[A-Za-z])(?P<value>[\d.].*)", re.DOTALL)
# Hydra: `+a.b=1` adds a key, `++a.b=1` sets it in any case.
_ASSIGNMENT = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
_NO = "no_"
_SCRIPT_ENDINGS = (".py", ".sh", ".ipynb")
MAX_ARGUMENTS = 4000


def argument_parameters(argv: Sequence[str]) -> Parameters:
    """Return the parameters in the arguments of a command, with dotted keys.

    `-` in a name is `_`, as argparse has it. An option with several values, or one that is repeated, is a list. The
    options of a launcher have its name before theirs: `torchrun.nproc_per_node`. Secrets are `***`.
    """
    found: dict[str, list[str | bool]] = {}
    for command in inner_commands(redact_argv(argv)):
        launcher_words, words = _split(command)
        prefix = f"{_launcher_of(command)}." if command.is_launcher else ""
        for name, values in (*_read(launcher_words, prefix), *_read(words, "")):
            found.setdefault(name, []).extend(values)
    return flatten({name: _to_parameter(name, values) for name, values in found.items()})


def _split(command: InnerCommand) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words of the launcher of a command, and those of what it trains."""
    words = command.words[1:]
    if not (command.is_launcher or command.is_python or command.program in SHELLS):
        return (), words
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if word.endswith(_SCRIPT_ENDINGS):
            return _of_launcher(command, words[:index]), words[index + 1 :]
        if before in ("-m", "--module") and word not in LAUNCHER_MODULES:
            return _of_launcher(command, words[: index - 1]), words[index + 1 :]
    # Those of `bash -c` are no parameters, those of `tune run RECIPE` are.
    return (), words if command.is_launcher else ()


def _of_launcher(command: InnerCommand, words: Sequence[str]) -> Sequence[str]:
    """Return the options of a launcher. Those of python and of shells are no parameters."""
    start = words.index(command.module) + 1 if command.module in words else 0
    return words[start:] if command.is_launcher else ()


def _launcher_of(command: InnerCommand) -> str:
    return "torchrun" if command.is_torchrun else command.module.partition(".")[0] or command.program


def _read(words: Sequence[str], prefix: str) -> Iterator[tuple[str, list[str | bool]]]:
    """Yield the options and assignments of words with their values."""
    index, words = 0, words[:MAX_ARGUMENTS]
    while index < len(words):
        word = words[index]
        index += 1
        if (match := _SHORT.fullmatch(word) or _OPTION.fullmatch(word)) is not None:
            values: list[str | bool] = [match["value"]] if match["value"] is not None else []
            if not values:
                while index < len(words) and _is_value(words[index]):
                    values.append(words[index])
                    index += 1
            name = match["name"].replace("-", "_")
            if not values:
                is_off = name.startswith(_NO) and len(name) > len(_NO)
                name, values = (name.removeprefix(_NO), [False]) if is_off else (name, [True])
            yield prefix + name, values
        elif (match := _ASSIGNMENT.fullmatch(word)) is not None:
            yield prefix + match["name"].replace("-", "_"), [match["value"]]


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value. A negative number is one."""
    if word.startswith("-"):
        return word == "-" or parse_number(word) is not None
    return _ASSIGNMENT.fullmatch(word) is None


def _to_parameter(name: str, values: Sequence[str | bool]) -> Scalar | list[Scalar]:
    scalars = [parse_scalar(redact(name, value)) if isinstance(value, str) else value for value in values]
    return scalars[0] if len(scalars) == 1 else scalars
