"""Help pages: every command is listed in a group, has a one-line summary and an example, and fits 80 columns."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tui.cli.help import MACHINE, RESULTS, RUNS, TRAIN
from tui.cli.main import app

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


def help_page(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*arguments, "--help"], terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def test_main_help_lists_every_command_once_on_one_line() -> None:
    groups = re.split(rf"^({TRAIN}|{RUNS}|{RESULTS}|{MACHINE}):$", help_page().partition("Options:")[0], flags=re.M)[1:]
    assert groups[::2] == [TRAIN, RUNS, RESULTS, MACHINE]
    rows = [line for group in groups[1::2] for line in group.splitlines() if line]
    assert sorted(row.split()[0] for row in rows) == COMMANDS
    assert all(re.fullmatch(r"  [\w-]+ +[A-Z].*\.", row) for row in rows)


SUBCOMMANDS = [(name, sub) for name in COMMANDS for sub in getattr(get_command(app).commands[name], "commands", ())]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("command", "subcommand"), [pair for pair in SUBCOMMANDS if pair[1] != "list"])
def test_subcommand_is_listed_on_one_line_and_has_example_in_80_columns(command: str, subcommand: str) -> None:
    assert re.search(rf"^  {subcommand} +[A-Z].*\.$", help_page(command), flags=re.M)
    page = help_page(command, subcommand)
    assert page.startswith(f"Usage: gputrain {command} {subcommand} [OPTIONS]")
    assert f"    gputrain {command} {subcommand}" in page.partition("Examples:")[2]
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_has_example_and_fits_80_columns(command: str) -> None:
    page = help_page(command)
    usage = page.splitlines()[0]
    arguments = r"(RUN(\.\.\.)?|IMAGE\.\.\.|COMMAND|\[[A-Z=]+\](\.\.\.)?)"
    assert re.fullmatch(rf"Usage: \w+ {command} \[OPTIONS\]( {arguments})*", usage)
    assert f"    gputrain {command}" in page.partition("Examples:")[2]
    assert max(map(len, page.splitlines())) <= 80
