"""Help pages: every command is listed in a group, has a one-line summary and valid examples, and fits 80 columns."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.config.code_trust import CodeTrust
from engine.config.schema import fields
from engine.sweeps.plan import plan_sweep
from engine.sweeps.settings import SweepSettings, split_space
from support.command_lines import parse_line
from tui.cli.help import MACHINE, PREPARE, RESULTS, RUNS, TRAIN, join_key_options
from tui.cli.main import app
from tui.cli.tree import WORDS, subcommands

ROOT = Path(__file__).parents[3]
PANELS = [TRAIN, PREPARE, RUNS, RESULTS, MACHINE]
SUBCOMMANDS = [(word, name) for word in WORDS for name in subcommands(word) if name != WORDS[word].default]


@cache
def help_page(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*arguments, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def test_main_help_lists_every_command_once_on_one_line() -> None:
    groups = re.split(rf"^({'|'.join(PANELS)}):$", help_page().partition("Options:")[0], flags=re.M)[1:]
    assert groups[::2] == PANELS
    rows = [line for group in groups[1::2] for line in group.splitlines() if line]
    assert [row.split()[0] for row in rows] == [*WORDS]
    assert all(re.fullmatch(r"  [\w-]+ +[A-Z].*\.", row) for row in rows)


@pytest.mark.parametrize(("command", "subcommand"), SUBCOMMANDS)
def test_subcommand_is_listed_on_one_line_and_has_example_in_80_columns(command: str, subcommand: str) -> None:
    assert re.search(rf"^  {subcommand} +[A-Z].*\.$", help_page(command), flags=re.M)
    page = help_page(command, subcommand)
    assert page.startswith(f"Usage: gputrain {command} {subcommand} [OPTIONS]")
    assert f"    gputrain {command} {subcommand}" in page.partition("Examples:")[2]
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize(("module", "own_file"), [("tui", "engine.py"), ("engine", "utils.py")])
def test_python_m_prints_help_beside_own_code(module: str, own_file: str, tmp_path: Path) -> None:
    (tmp_path / own_file).write_text("raise SystemExit('the own module of the user')\n")
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Train PyTorch models on multiple GPUs" in done.stdout


def test_join_key_options_accepts_each_key() -> None:
    keys = [key for key, _ in fields()]
    assert join_key_options([word for key in keys for word in (f"--{key}", "-1")]) == [f"{key}=-1" for key in keys]


def test_join_key_options_keeps_other_arguments() -> None:
    words = ["a.yaml", "--lr", "0.1", "--name=a.b", "--data-path", "x.gpk", "--", "--optim.lr", "1"]
    assert join_key_options(words) == words


@pytest.mark.parametrize("command", WORDS)
def test_command_help_has_example_and_fits_80_columns(command: str) -> None:
    page = help_page(command)
    usage = page.splitlines()[0]
    arguments = r"(RUN(\.\.\.)?|PATH\.\.\.(\|PID)?|\[[A-Z=]+\](\.\.\.)?)"
    assert re.fullmatch(rf"Usage: \w+ {command} \[OPTIONS\]( {arguments})*", usage)
    assert f"    gputrain {command}" in page.partition("Examples:")[2]
    assert max(map(len, page.splitlines())) <= 80


PAGES = [(), *((name,) for name in WORDS), *SUBCOMMANDS]


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
