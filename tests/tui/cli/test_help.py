"""Help pages: every command is listed in a group, and a page has its examples first and fits 80 columns."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.command_lines import parse_arguments, parse_line
from support.help_pages import HELP_PAGES, PAGES, format_pages, help_page
from tui.cli.help import join_key_options
from tui.cli.main import app

ROOT = Path(__file__).parents[3]


def test_help_pages_equal_golden_file() -> None:
    assert format_pages() == HELP_PAGES.read_text(), "if this is intended: python tests/support/help_pages.py"


@pytest.mark.parametrize(("module", "own_file"), [("tui", "engine.py"), ("engine", "utils.py")])
def test_python_m_prints_help_beside_own_code(module: str, own_file: str, tmp_path: Path) -> None:
    (tmp_path / own_file).write_text("raise SystemExit('the own module of the user')\n")
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"train image classifiers" in done.stdout


def test_join_key_options_keeps_other_arguments() -> None:
    words = ["a.yaml", "--lr", "0.1", "--name=a.b", "--data-path", "x.tar", "--", "--optim.lr", "1"]
    assert join_key_options(words) == words


@pytest.mark.parametrize(
    ("typed", "joined"),
    [
        ("run digits --weight-decay 5e-4", ["optim.weight_decay=5e-4"]),
        ("sweep digits --val-split=0.1", ["data.val_split=0.1"]),
        ("run digits --deterministic --flip", ["device.deterministic=true", "augment.flip=true"]),
        ("run digits --augment.flip", ["augment.flip=true"]),
        ("run digits --augment.flip false", ["augment.flip=false"]),
        ("evaluate last --tta flip", ["eval.tta=flip"]),
    ],
)
def test_option_of_a_key_needs_no_section(typed: str, joined: list[str]) -> None:
    assert parse_arguments(typed.split()) == joined


@pytest.mark.parametrize(
    "typed", ["run --options 1", "run --min-delta 1", "sweep digits --begin 22:00", "logs a --eps 1"]
)
def test_option_that_is_no_key_of_the_command_is_refused(typed: str) -> None:
    assert parse_line(typed.split()) == 2


def test_help_is_a_word_too() -> None:
    runner = CliRunner(env={"COLUMNS": "80"})
    assert runner.invoke(app, ["help", "runs", "show"], terminal_width=80).output == help_page("runs", "show")
    assert runner.invoke(app, ["help"], terminal_width=80).output == help_page()


def examples(*page: str) -> list[list[str]]:
    """Return the examples of a help page as words, without `gputrain` and without the comment after several blanks."""
    lines = re.findall(r"^    gputrain (.*?)(?:   .*)?$", help_page(*page).partition("Examples:")[2], flags=re.M)
    return [shlex.split(line) for line in lines]


def test_help_examples_parse() -> None:
    lines = [words for page in PAGES for words in examples(*page)]
    assert len(lines) > len(PAGES)
    assert [words for words in lines if parse_line(words) != 0] == []
