"""The documentation names files, commands, events and keys that exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.runs.control import REQUEST_NAMES
from engine.runs.journal import EVENT_TYPES
from support.command_lines import parse_line
from tui.cli.help import KEY_OPTION, build_command
from tui.cli.tree import COMMANDS, GUESSES, WORDS

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
    "engine/README.md",
    "engine/JSON.md",
    "tui/cli/skill.md",
    "tui/README.md",
    "tests/README.md",
    "tests/bench/README.md",
    "tests/gpu_hour/README.md",
]
# Sent to the supervisor, which does not write them to the journal.
UNWRITTEN_EVENTS = {"refused", "flush"}

# What lines begin with that stand for a command, and the options of `gputrain` itself.
PLACEHOLDERS = ("ARGUMENTS", "COMMAND", "x ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_docs_link_to_existing_files(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / unquote(link)).exists()] == []


@pytest.mark.parametrize("page", ["engine/README.md", "tui/README.md"])
def test_architecture_pages_name_existing_modules_and_objects(page: str) -> None:
    """`module.py` (`Name`) means that the module defines it."""
    named = re.findall(r"`((?:\w+/)*\w+\.py)`(?:\s+\(`(\w+)(?:\.\w+)?`\))?", (ROOT / page).read_text())
    assert named
    for module, name in named:
        path = next(folder / module for folder in ((ROOT / page).parent, ROOT) if (folder / module).exists())
        assert not name or re.search(rf"^(class |def )?{name}\b", path.read_text(), re.M), f"{module} has no {name}"


def test_engine_page_lists_every_journal_event_and_control_request() -> None:
    text = (ROOT / "engine/README.md").read_text()
    assert [name for name in {*EVENT_TYPES} - UNWRITTEN_EVENTS | {*REQUEST_NAMES} if f"`{name}`" not in text] == []


def test_checkpoint_module_describes_every_key() -> None:
    docstring = (ROOT / "engine/training/checkpoint.py").read_text().partition('"""')[2].partition('"""')[0]
    assert [key for key in CHECKPOINT_KEYS if not re.search(rf"\b{key}\b", docstring)] == []


def test_commands_that_gputrain_starts_exist() -> None:
    """A list of words that begins with a command is one that a module starts."""
    started = [
        [
            part.value if isinstance(part, ast.Constant) else "x"
            for part in node.elts
            if not isinstance(part, ast.Starred)
        ]
        for folder in ("engine", "tui")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant)
    ]
    lines = [words for words in started if words[0] in WORDS and any(str(word).startswith("--") for word in words)]
    assert len(lines) > 2
    assert [words for words in lines if parse_line(words) != 0] == []


def command_lines(text: str) -> Iterator[str]:
    """Yield what a text has in backticks behind `gputrain`, and each such line of its shell blocks."""
    for line in re.findall(r"`gputrain\s([^`]+)`", text):
        yield " ".join(line.split())
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        yield from re.findall(r"^gputrain (.+?)(?:  +#.*)?$", block, re.M)


def lines_of_table(text: str) -> Iterator[str]:
    """Yield the other commands of each row of a table whose first cell begins with `gputrain`."""
    for cell in re.findall(r"^\| (`gputrain [^|]+?) \|", text, re.M):
        yield from (span for span in re.findall("`([^`]+)`", cell) if not span.startswith("gputrain"))


def strings(folder: str) -> Iterator[str]:
    """Yield the strings of each module below a folder; ` x ` stands for what a format inserts."""
    for path in (ROOT / folder).rglob("*.py"):
        tree = ast.parse(path.read_text())
        inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else " x " for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                yield node.value


def is_command(line: str) -> bool:
    """Whether a line names a command, its options, and their choices."""
    first, *words = shlex.split(line.replace("…", "")) or [""]
    word = WORDS.get(first)
    if word is None or " ".join([first, *words[:1]]) in GUESSES:
        return False
    name = " ".join([first, *words[:1]])
    command = build_command(name if name in COMMANDS else f"{first} {word.default}".rstrip())
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for typed, following in zip(words, [*words[1:], ""], strict=False):
        if typed == "--":
            break
        option, _, value = typed.partition("=")
        if not typed.startswith("--") or option == "--help" or KEY_OPTION.fullmatch(option):
            continue
        if option not in options:
            return False
        value, choices = value or following, options[option].type_descriptor.choices
        if choices and re.fullmatch("[a-z-]{2,}", value) and value not in choices:
            return False
    return True


def test_commands_in_texts_exist() -> None:
    """Documents, presets and the strings of the code name commands and options of `gputrain` as they are."""
    documents = [(ROOT / page).read_text() for page in PAGES]
    presets = [path.read_text() for path in (ROOT / "configs").iterdir()]
    texts = [*documents, *presets, *strings("engine"), *strings("tui")]
    lines = {line for text in texts for line in command_lines(text)}
    lines |= {line for text in documents for line in lines_of_table(text)}
    lines = {line for line in lines if line and not line.startswith(PLACEHOLDERS)}
    assert len(lines) > 100
    assert sorted(line for line in lines if not is_command(line)) == []
    named = [words for text in texts for words in re.findall(r"\bgputrain (?=([a-z-]+(?: [a-z-]+)?))", text)]
    old = {words for words in named for count in (1, 2) if " ".join(words.split()[:count]) in GUESSES}
    assert sorted(old) == []


def test_fault_table_names_existing_tests() -> None:
    page = (ROOT / "tests" / "README.md").read_text()
    rows = page.partition("| Fault |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) > 50
    missing = []
    for row in rows:
        places = row.strip("| ").split("|")[-1]
        folder = Path()
        for name in re.sub(r"\(.*?\)", "", places).replace(";", ",").split(","):
            path = Path(name.strip())
            # A name without a folder follows another file of that folder.
            folder = path.parent if "/" in name else folder
            if not (ROOT / "tests" / folder / f"{path.name}.py").exists():
                missing.append(f"{name.strip()} in: {row[:60]}")
    assert missing == []
