"""Commands that an argument list starts, and the parameters of a training in their arguments.

`inner_commands` finds the one behind `env`, `timeout` or `uv run`, and those inside `sh -c`: a guess from words alone,
which does no harm where it is wrong. `argument_parameters` reads `--lr 0.1`, `lr=0.1` and `--no-amp`, by the names
that the configuration of the trainer has, so that runs of a command compare with watched ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

from engine.foreign.parameters import Parameters, flatten, parse_scalar
from engine.foreign.reading import Scalar, parse_number
from engine.utils.redaction import redact, redact_argv

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
# Programs that start the command behind their options, and their subcommands that do so.
WRAPPERS = frozenset({
    "env", "nice", "ionice", "time", "timeout", "stdbuf", "taskset", "numactl", "sudo", "exec", "command", "nohup",
    "setsid", "uv", "poetry", "pdm", "pixi", "pipenv", "hatch", "rye", "conda", "mamba", "micromamba", "nsys",
})  # fmt: skip
SUBCOMMANDS = frozenset({"run", "profile"})
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "composer", "tune"})
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
TORCHRUN_MODULES = LAUNCHER_MODULES[:2]
SCRIPT_ENDINGS = (".py", ".sh")
MAX_DEPTH = 3
MAX_SHELL_TEXT = 1 << 16
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NUMBERS = re.compile(r"[\d.,:-]+[smhd]?")
_PYTHON = re.compile(r"python[\d.]*")
_SEPARATORS = frozenset({";", ";;", "&", "&&", "|", "||", "|&", "(", ")", "{", "}", "do", "then", "else", "done", "fi"})
_CONTROL_WORDS = frozenset({"if", "while", "until", "!"})


@dataclass(frozen=True)
class InnerCommand:
    """A command: its `words`, program first."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The name of the program without its folder, empty if there is none."""
        return _name(self.words[0]) if self.words else ""

    @property
    def is_python(self) -> bool:
        return bool(_PYTHON.fullmatch(self.program))

    @property
    def module(self) -> str:
        """The module of `python -m`, empty if there is none."""
        following = dict(zip(self.own_arguments, self.own_arguments[1:], strict=False)) if self.is_python else {}
        return following.get("-m", "")

    @property
    def own_arguments(self) -> tuple[str, ...]:
        """The arguments before the script, which are those of the program itself."""
        end = self.words.index(self.script) if self.script else len(self.words)
        return self.words[1:end]

    @property
    def is_launcher(self) -> bool:
        """Whether the program starts one process per GPU."""
        return self.program in LAUNCHERS or self.module in LAUNCHER_MODULES

    @property
    def is_torchrun(self) -> bool:
        return self.program == "torchrun" or self.module in TORCHRUN_MODULES

    @property
    def script(self) -> str:
        """The first Python or shell script among the words, empty if there is none."""
        return next((word for word in self.words if word.endswith(SCRIPT_ENDINGS)), "")


def inner_commands(argv: Sequence[str], depth: int = MAX_DEPTH) -> list[InnerCommand]:
    """Return the commands that these arguments start, in their order."""
    command = InnerCommand(tuple(argv[_program_index(argv) :]))
    if command.program not in SHELLS or depth == 0:
        return [command]
    option = _line_option(command.words)
    texts = command.words[option + 1 : option + 2] if option is not None else ()
    return [command, *(inner for text in texts for inner in _shell_commands(text[:MAX_SHELL_TEXT], depth - 1))]


def ends_with_shell_line(argv: Sequence[str]) -> bool:
    """Whether a command is `sh -c LINE`, whose further arguments are `$0`, `$1` … of the line."""
    program = inner_commands(argv, 0)[0]
    return program.program in SHELLS and _line_option(program.words) == len(program.words) - 2


def _line_option(words: Sequence[str]) -> int | None:
    """Return the place of the option of a shell that the line to run follows; None without one."""
    return next((place for place, word in enumerate(words) if re.fullmatch(r"-[a-z]*c[a-z]*", word)), None)


def _program_index(words: Sequence[str]) -> int:
    for place, word in enumerate(words):
        name = _name(word)
        is_wrapper = name in WRAPPERS or (place > 0 and word in SUBCOMMANDS)
        if is_wrapper or word.startswith("-") or _ASSIGNMENT.match(word) or _NUMBERS.fullmatch(word):
            continue
        before = words[place - 1] if place else ""
        is_option_value = before.startswith("-") and "=" not in before and len(words) > place + 1
        # `uv run --offline train.py`
        is_option_value = is_option_value and not name.endswith(SCRIPT_ENDINGS)
        if is_option_value and name not in SHELLS | LAUNCHERS and not _PYTHON.fullmatch(name):
            continue
        return place
    return len(words)


def _shell_commands(text: str, depth: int) -> Iterator[InnerCommand]:
    lexer = shlex.shlex(text.replace("\\\n", " ").replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "", True
    try:
        tokens = list(lexer)
    except ValueError:
        # A quote without its partner.
        return
    for is_separator, part in groupby(tokens, _SEPARATORS.__contains__):
        words = list(part)
        if not is_separator:
            yield from inner_commands(words[1:] if words[0] in _CONTROL_WORDS else words, depth)


def _name(word: str) -> str:
    return PurePath(word).name


_OPTION = re.compile(r"--?(?P<name>[A-Za-z_][\w.:/-]*)(?:=(?P<value>.*))?", re.DOTALL)
# `-b32`
_SHORT = re.compile(r"-(?P<name>[A-Za-z])(?P<value>[\d.].*)", re.DOTALL)
# Hydra: `+a.b=1` adds a key, `++a.b=1` sets it in any case.
_KEY_VALUE = re.compile(r"\+{0,2}(?P<name>[A-Za-z_][\w.@/-]*)=(?P<value>.*)", re.DOTALL)
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
        elif (match := _KEY_VALUE.fullmatch(word)) is not None:
            yield prefix + match["name"].replace("-", "_"), [match["value"]]


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value. A negative number is one."""
    if word.startswith("-"):
        return word == "-" or parse_number(word) is not None
    return _KEY_VALUE.fullmatch(word) is None


def _to_parameter(name: str, values: Sequence[str | bool]) -> Scalar | list[Scalar]:
    scalars = [parse_scalar(redact(name, value)) if isinstance(value, str) else value for value in values]
    return scalars[0] if len(scalars) == 1 else scalars
