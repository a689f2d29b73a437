"""Commands that an argument list starts: the one behind `env`, `timeout` or `uv run`, and those inside `sh -c`.

A guess from words alone, for names, parameters and variables that do no harm where it is wrong.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

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
