"""The documentation names files, commands, events and keys that exist."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from typer.main import get_command

from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.runs.control import REQUEST_NAMES
from engine.runs.journal import EVENT_TYPES
from tui.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    ".github/CONTRIBUTING.md",
    ".github/SECURITY.md",
    "engine/README.md",
    "tui/README.md",
    "tests/README.md",
    "tests/bench/README.md",
    "tests/gpu_hour/README.md",
]
# Sent to the supervisor, which does not write them to the journal.
UNWRITTEN_EVENTS = {"refused", "flush"}


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


def test_readme_names_existing_commands() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"(?:^|`|/)gputrain ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    assert named - {"in"}
    assert sorted(named - set(commands)) == []


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
