"""The documentation names files, commands, events and keys that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from engine.config.schema import fields
from support.help_pages import HELP_PAGES
from tui.cli.help import KEY_OPTION, build_command
from tui.cli.tree import COMMANDS, WORDS
from tui.cli.usage_errors import takes_config_keys

ROOT = Path(__file__).parents[1]
# The pages about the code: `engine/README.md`, `tui/README.md`, and a page per subject beside its package.
SUBJECT_PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("engine/README.md", "engine/*/*.md", "tui/README.md", "tui/*/README.md")
    for path in ROOT.glob(pattern)
)
PAGES = [
    "README.md",
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
    "engine/EVENTS.md",
    "engine/JSON.md",
    "engine/OWN_CODE.md",
    "tui/cli/skill.md",
    *SUBJECT_PAGES,
    "tests/README.md",
    "tests/bench/README.md",
]

# What lines begin with that stand for a command, and the options of `gputrain` itself.
KEY_NAMES = {key.partition(".")[2] for key, _ in fields()}
PLACEHOLDERS = ("ARGUMENTS", "COMMAND", "x ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_docs_link_to_existing_files_and_headings(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text())
    assert [link for link, _ in links if not (path.parent / unquote(link)).exists()] == []
    assert [
        link for link in links if link[1] and link[1] not in anchors(path.parent / link[0] if link[0] else path)
    ] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


def is_command(line: str) -> bool:
    """Whether a line names a command, its options, and their choices."""
    first, *words = shlex.split(line.replace("…", "")) or [""]
    word = WORDS.get(first)
    if word is None:
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
            # The option of a key without its section, such as --weight-decay.
            if takes_config_keys(command) and option.removeprefix("--").replace("-", "_") in KEY_NAMES:
                continue
            return False
        value, choices = value or following, options[option].type_descriptor.choices
        if choices and re.fullmatch("[a-z-]{2,}", value) and value not in choices:
            return False
    return True


def test_commands_in_texts_exist() -> None:
    """Documents, presets and help pages name commands and options of `gputrain` as they are."""
    documents = [(ROOT / page).read_text() for page in PAGES]
    presets = [path.read_text() for path in (ROOT / "configs").iterdir()]
    texts = [*documents, *presets, HELP_PAGES.read_text()]
    lines = {line for text in texts for line in command_lines(text)}
    lines |= {line for text in documents for line in lines_of_table(text)}
    lines = {line for line in lines if line and not line.startswith(PLACEHOLDERS)}
    assert len(lines) > 100
    assert sorted(line for line in lines if not is_command(line)) == []


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
