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

from engine.config.code_trust import CodeTrust
from engine.config.schema import fields, first_sentence
from engine.sweeps.plan import plan_sweep
from engine.sweeps.settings import SweepSettings, split_space
from support.command_lines import parse_arguments, parse_line
from support.help_pages import HELP_PAGES, PAGES, format_pages, help_page
from tui.cli.help import join_key_options
from tui.cli.main import app
from tui.cli.tree import TOP_PANELS, WORDS

ROOT = Path(__file__).parents[3]
SUBCOMMANDS = [page for page in PAGES if len(page) == 2]
# An example is seen without scrolling, and the page of all commands on a small terminal.
MAX_LINES_BEFORE_EXAMPLE, MAX_LINES, MAX_RUN_LINES, MAX_OPTION_LINES = 12, 40, 88, 2


def test_help_pages_equal_golden_file() -> None:
    assert format_pages() == HELP_PAGES.read_text(), "if this is intended: python tests/support/help_pages.py"


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_help_page_begins_with_example_and_fits_80_columns(page: tuple[str, ...]) -> None:
    lines = help_page(*page).splitlines()
    example = " ".join(("    gputrain", *page[:1]))
    assert any(line.startswith(example) for line in lines[:MAX_LINES_BEFORE_EXAMPLE])
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_option_has_at_most_two_lines_of_help(page: tuple[str, ...]) -> None:
    for entry in re.findall(r"^  -.*(?:\n    +\S.*)*", help_page(*page), flags=re.M):
        lines = entry.splitlines()
        # Only the name of an option that is wider than the column.
        own_line = len(lines[0]) < len(lines[-1]) - len(lines[-1].lstrip()) or "  " not in lines[0].strip()
        assert len(lines) - own_line <= MAX_OPTION_LINES, entry


def test_top_and_run_fit_few_lines() -> None:
    assert len(help_page().splitlines()) <= MAX_LINES
    assert len(help_page("run").splitlines()) <= MAX_RUN_LINES


def test_config_key_is_described_by_a_short_first_sentence() -> None:
    sentences = {key: first_sentence(str(info.description)) for key, info in fields()}
    assert [text for text in sentences.values() if len(text) > 70 or not text.endswith(".")] == []


def test_main_help_lists_every_command_once_on_one_line() -> None:
    groups = re.split(rf"^({'|'.join(TOP_PANELS)}):$", help_page().partition("Options:")[0], flags=re.M)[1:]
    assert groups[::2] == [*TOP_PANELS]
    rows = [line for group in groups[1::2] for line in group.splitlines() if line.strip()]
    assert [row.split()[0] for row in rows] == [*WORDS]
    assert all(re.fullmatch(r"  [\w-]+ +[A-Z].*\.", row) for row in rows)


@pytest.mark.parametrize(("command", "subcommand"), SUBCOMMANDS)
def test_subcommand_is_listed_on_one_line_and_has_example(command: str, subcommand: str) -> None:
    assert re.search(rf"^  {subcommand} +[A-Z].*\.$", help_page(command), flags=re.M)
    page = help_page(command, subcommand)
    assert page.startswith(f"Usage: gputrain {command} {subcommand} [OPTIONS]")
    assert f"    gputrain {command} {subcommand}" in page.partition("Examples:")[2]


@pytest.mark.parametrize(("module", "own_file"), [("tui", "engine.py"), ("engine", "utils.py")])
def test_python_m_prints_help_beside_own_code(module: str, own_file: str, tmp_path: Path) -> None:
    (tmp_path / own_file).write_text("raise SystemExit('the own module of the user')\n")
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"train image classifiers" in done.stdout


def test_join_key_options_accepts_each_key() -> None:
    keys = [key for key, _ in fields()]
    assert join_key_options([word for key in keys for word in (f"--{key}", "-1")]) == [f"{key}=-1" for key in keys]


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


@pytest.mark.parametrize("command", WORDS)
def test_command_help_names_its_arguments(command: str) -> None:
    usage = help_page(command).splitlines()[0]
    arguments = r"(RUN(\.\.\.)?|PATH\.\.\.(\|PID)?|\[[A-Z=]+\](\.\.\.)?)"
    assert re.fullmatch(rf"Usage: \w+ {command} \[OPTIONS\]( {arguments})*", usage)


def examples(*page: str) -> list[list[str]]:
    """Return the examples of a help page as words, without `gputrain` and without the comment after several blanks."""
    lines = re.findall(r"^    gputrain (.*?)(?:   .*)?$", help_page(*page).partition("Examples:")[2], flags=re.M)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_help_examples_parse(page: tuple[str, ...]) -> None:
    assert examples(*page)
    assert [words for words in examples(*page) if parse_line(words) != 0] == []


def test_sweep_examples_name_values_that_the_config_accepts(tmp_path: Path) -> None:
    searching = [words for words in examples("sweep") if any("=" in word for word in words) and "--" not in words]
    assert searching
    for _, _, *words in searching:
        space, fixed = split_space(
            (key, text) for key, is_space, text in (word.partition("=") for word in words) if is_space
        )
        settings = SweepSettings("digits", space, fixed | {"device.gpus": "cpu"})
        assert plan_sweep(settings, tmp_path, trust=CodeTrust()).settings.space == space
