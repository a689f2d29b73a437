"""What a typed command trains: the script or module behind launchers and shells, and the parameters in its arguments.

A guess from words alone, which does no harm where it is wrong. `argument_parameters` reads `--lr 0.1`, `lr=0.1` and
`--no-amp`, by the names that the configuration of the trainer has, so that runs of a command compare with watched ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

from engine.base.redaction import redact, redact_argv
from engine.watch.parameters import Parameters, flatten, parse_scalar
from engine.watch.reading import Scalar, parse_number

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
# Programs that start the command behind their options.
WRAPPERS = frozenset(
    {"env", "exec", "nice", "nohup", "time", "timeout", "setsid", "sudo", "taskset", "numactl", "uv", "run"}
)
# Programs that start a script or a module, beside Python and shells.
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "composer", "mpirun", "mpiexec", "srun"})
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
LAUNCHER_MODULES = (*TORCHRUN_MODULES, "accelerate.commands.launch")
SCRIPT_ENDINGS = (".py", ".sh", ".ipynb")
MAX_SHELL_TEXT = 1 << 16
MAX_ARGUMENTS = 4000
_SEPARATORS = frozenset({";", "&", "&&", "|", "||", "(", ")", "{", "}", "do", "done", "then", "else", "fi"})
_ASSIGNMENT_OR_NUMBER = re.compile(r"[A-Za-z_]\w*=.*|[\d.,:-]+[smhd]?", re.DOTALL)
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True)
class TypedCommand:
    """A command line: the words before the `script`, its file or module, "" without one, and the `arguments` of it."""

    before: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program behind wrappers, without its folder."""
        names = [PurePath(word).name for word in self.before]
        return next((name for name in names if name not in WRAPPERS and not _is_no_program(name)), "".join(names[:1]))

    @property
    def torchrun_words(self) -> tuple[str, ...] | None:
        """The arguments of torchrun before its script; None if the command is none of torchrun."""
        places = [
            place
            for place, word in enumerate(self.before)
            if PurePath(word).name == "torchrun" or word in TORCHRUN_MODULES
        ]
        return self.before[places[0] + 1 :] if places else None


def typed_command(argv: Sequence[str]) -> TypedCommand:
    """Return the first command with a script or a module among these words, or inside `sh -c`."""
    words = [*argv]
    if (place := _shell_line(words)) is not None:
        words = _split_line(words[place][:MAX_SHELL_TEXT])
    for place, word in enumerate(words):
        is_module = place > 0 and words[place - 1] in ("-m", "--module") and word not in LAUNCHER_MODULES
        if (is_module or word.endswith(SCRIPT_ENDINGS)) and _start_script(words[:place]):
            rest = takewhile(lambda word: word not in _SEPARATORS, words[place + 1 :])
            return TypedCommand(tuple(words[: place - is_module]), word, tuple(rest))
    command = TypedCommand(tuple(words), "", tuple(words[1:]))
    # The options of python and of shells are no parameters.
    is_other = _PYTHON.fullmatch(command.program) or PurePath(argv[0]).name in SHELLS
    return TypedCommand(command.before, "", ()) if is_other else command


def ends_with_shell_line(argv: Sequence[str]) -> bool:
    """Whether a command is `sh -c LINE`, whose further arguments are `$0`, `$1` … of the line."""
    return _shell_line(argv) == len(argv) - 1


def _shell_line(argv: Sequence[str]) -> int | None:
    """Return the place of the line that a shell is to run; None without one."""
    # `-c` behind a script is an option of that.
    words = [*takewhile(lambda word: not word.endswith(SCRIPT_ENDINGS), argv)]
    shell = next((place for place, word in enumerate(words) if PurePath(word).name in SHELLS), len(argv))
    places = range(shell + 1, min(len(words), len(argv) - 1))
    return next((place + 1 for place in places if re.fullmatch(r"-[a-z]*c[a-z]*", argv[place])), None)


def _start_script(words: Sequence[str]) -> bool:
    """Whether these words start the script behind them, which is the value of an option of any other program."""
    names = [PurePath(word).name for word in takewhile(lambda word: word not in _SEPARATORS, reversed(words))]
    return any(name in LAUNCHERS or name in SHELLS or _PYTHON.fullmatch(name) for name in names) or all(
        name in WRAPPERS or _is_no_program(name) for name in names
    )


def _split_line(text: str) -> list[str]:
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    try:
        return list(lexer)
    except ValueError:
        # A quote without its partner.
        return []


def _is_no_program(word: str) -> bool:
    return word.startswith("-") or _ASSIGNMENT_OR_NUMBER.fullmatch(word) is not None


_OPTION = re.compile(r"--?(?P<name>[A-Za-z_][\w.:/-]*)(?:=(?P<value>.*))?", re.DOTALL)
# `-b32`
_SHORT = re.compile(r"-(?P<name>[A-Za-z])(?P<value>[\d.].*)", re.DOTALL)
# Hydra: `+a.b=1` adds a key, `++a.b=1` sets it in any case.
_KEY_VALUE = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
_NO = "no_"


def argument_parameters(argv: Sequence[str]) -> Parameters:
    """Return the parameters in the arguments of a command, with dotted keys.

    `-` in a name is `_`, as argparse has it. An option with several values, or one that is repeated, is a list. Secrets
    are `***`.
    """
    found: dict[str, list[str | bool]] = {}
    for name, values in _read(typed_command(redact_argv(argv)).arguments[:MAX_ARGUMENTS]):
        found.setdefault(name, []).extend(values)
    return flatten({name: _to_parameter(name, values) for name, values in found.items()})


def _read(words: Sequence[str]) -> Iterator[tuple[str, list[str | bool]]]:
    """Yield the options and assignments of words with their values."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if (match := _SHORT.fullmatch(word) or _OPTION.fullmatch(word)) is not None:
            values: list[str | bool] = [match["value"]] if match["value"] is not None else []
            if not values:
                values = [*takewhile(_is_value, words[index:])]
                index += len(values)
            name = match["name"].replace("-", "_")
            if not values:
                is_off = name.startswith(_NO) and len(name) > len(_NO)
                name, values = (name.removeprefix(_NO), [False]) if is_off else (name, [True])
            yield name, values
        elif (match := _KEY_VALUE.fullmatch(word)) is not None:
            yield match["name"].replace("-", "_"), [match["value"]]


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value. A negative number is one."""
    if word.startswith("-"):
        return word == "-" or parse_number(word) is not None
    return _KEY_VALUE.fullmatch(word) is None


def _to_parameter(name: str, values: Sequence[str | bool]) -> Scalar | list[Scalar]:
    scalars = [parse_scalar(redact(name, value)) if isinstance(value, str) else value for value in values]
    return scalars[0] if len(scalars) == 1 else scalars
