"""The tree of commands follows one grammar: an option means one thing, and what is guessed is answered."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

from support.command_lines import parse_line
from tui.cli.help import CONFIG_OPTIONS, build_command
from tui.cli.main import app
from tui.cli.tree import COMMANDS, GUESSES, OPTION_GUESSES, WORDS

# Modules that a command imports when it runs.
HEAVY_MODULES = {"torch", "pydantic", "rich", "textual"}
STEM_WORDS = 2
# Names of options that differ from one command to another, each with the reason. At most three.
EXCEPTIONS = {
    "--split": "`data` shows the images of one split, `evaluate` may take both",
    "--steps": "`lr-find` tries a learning rate for each, `runs profile` measures them",
}


@cache
def command(name: str) -> Any:
    return build_command(name)


def options(name: str) -> Iterator[Any]:
    """Yield the options of a command that are its own, not of config keys."""
    for param in command(name).params:
        if param.param_type_name == "option" and param.rich_help_panel != CONFIG_OPTIONS:
            yield param


def option_type(param: Any) -> str:
    """Return what an option takes: the type of its value, and whether it may be repeated."""
    annotation = param.type_descriptor.annotation
    return f"{'repeated ' if param.multiple else ''}{'flag' if param.is_flag else annotation}"


def stem(text: str | None) -> str:
    return " ".join(re.findall(r"[\w-]+", text or "")[:STEM_WORDS])


def test_option_has_one_type_metavar_and_help_stem() -> None:
    seen = defaultdict[str, dict[tuple[Any, ...], list[str]]](dict)
    for name in COMMANDS:
        for param in options(name):
            kind = option_type(param), param.metavar, tuple(param.secondary_opts), stem(param.help)
            for opt in param.opts:
                seen[opt].setdefault(kind, []).append(name)
    assert {opt: kinds for opt, kinds in seen.items() if len(kinds) > 1 and opt not in EXCEPTIONS} == {}
    assert len(EXCEPTIONS) <= 3


def test_config_flag_is_the_same_wherever_it_stands() -> None:
    """An option of a config key has the type and metavar of the key's flag, also on commands that do not train."""
    run = {param.opts[0]: param for param in command("run").params if param.rich_help_panel == CONFIG_OPTIONS}
    for name in COMMANDS:
        for param in command(name).params:
            if param.param_type_name == "option" and param.opts[0] in run:
                flag = run[param.opts[0]]
                assert (name, option_type(param), param.metavar) == (name, option_type(flag), flag.metavar)


@pytest.mark.parametrize("name", COMMANDS)
def test_choices_of_options_are_literals(name: str) -> None:
    """Help that lists single words, as in `train, val or all`, belongs to a Literal."""
    listed = re.compile(r"(?<![\w=])[\w-]+(, [\w-]+)* or [\w-]+(?=[.;]|$)")
    for param in options(name):
        annotation = param.type_descriptor.annotation
        values = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
        if annotation is str and not values and "=" not in (param.metavar or ""):
            assert listed.search(param.help or "") is None, f"{param.opts[0]}: {param.help}"
            assert "|" not in (param.metavar or "")


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_the_first_sentence_of_the_help(name: str) -> None:
    first = " ".join((command(name).help or "").split("\n\n")[0].split())
    assert re.match(r".*?\.(?= |$)", first)[0] == COMMANDS[name].summary  # type: ignore[index]


def test_words_are_commands_or_groups_with_a_default() -> None:
    for name, word in WORDS.items():
        assert (f"{name} {word.default}" if word.default else name) in COMMANDS
    assert {name.partition(" ")[0] for name in COMMANDS} == {*WORDS}


def refuse(*words: str) -> str:
    """Return what is said about words that are refused."""
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize("words", GUESSES)
def test_guess_of_command_is_answered(words: str) -> None:
    assert f"`{GUESSES[words]}`" in refuse(*words.split())
    assert words not in (*WORDS, *COMMANDS)
    program, *line = shlex.split(GUESSES[words])
    assert program == "gputrain-tui" or parse_line(line) == 0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train a.yaml --epochs 3", "gputrain run a.yaml --epochs 3"),
        ("kill a b", "gputrain stop a b"),
        ("runs rm 'a b'", "gputrain runs delete 'a b'"),
        ("tag a +old", "gputrain runs tag a +old"),
        ("mistakes a --count 3", "gputrain evaluate a --list mistakes"),
    ],
)
def test_guess_of_command_has_what_was_typed(typed: str, meant: str) -> None:
    assert f"did you mean `{meant}`?" in refuse(*shlex.split(typed))


@pytest.mark.parametrize("line", OPTION_GUESSES)
def test_guess_of_option_is_answered(line: str) -> None:
    *words, option = line.split()
    meant = OPTION_GUESSES[line]
    is_command = meant.startswith("gputrain ")
    assert f"did you mean {f'`{meant}`' if is_command else meant}?" in refuse(*words, option)
    if is_command:
        assert parse_line(shlex.split(meant)[1:]) == 0
        return
    name = " ".join(words)
    if name not in COMMANDS:
        name = f"{name} {WORDS[name].default}"
    known = {opt: param for param in command(name).params for opt in (*param.opts, *param.secondary_opts)}
    assert option not in known
    for opt, value in re.findall(r"(--[\w-]+)(?: (?!or\b)(\w+))?", meant):
        assert not value or value in known[opt].type_descriptor.choices


def test_modules_of_commands_import_nothing_heavy() -> None:
    modules = sorted({f"tui.cli.{entry.target.partition(':')[0]}" for entry in COMMANDS.values()})
    program = (
        "import importlib, sys\n"
        f"for name in {modules}:\n"
        "    importlib.import_module(name)\n"
        f"    if heavy := {HEAVY_MODULES!r} & {{*sys.modules}}:\n"
        "        sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0)
