"""Usage errors of the command line: one line each, the nearest name or the help, exit code 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tui.cli.main import app, screen_app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs --nosuch", "--nosuch: there is no such option; see `gputrain runs --help`"),
        ("runs --runs-dri x", "--runs-dri: there is no such option; did you mean --runs-dir?"),
        ("rnu digits", "rnu: there is no such command; did you mean run?"),
        ("notify tset", "tset: there is no such command; did you mean test?"),
        ("xyzzy", "xyzzy: there is no such command; see `gputrain --help`"),
        ("--verison", "--verison: there is no such option; did you mean --version?"),
        ("stop", "RUN: is missing; see `gputrain stop --help`"),
        ("sync a", "--to: is missing; see `gputrain sync --help`"),
        ("stop a b\x1b[31m", r"got unexpected extra argument(s) (b\x1b[31m); see `gputrain stop --help`"),
        ("run --epochs", "option '--epochs' requires an argument"),
    ],
)
def test_usage_error_takes_one_line(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), prog_name="gputrain")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_value_of_wrong_type_names_option() -> None:
    result = CliRunner().invoke(app, ["gpus", "--interval", "often"], prog_name="gputrain")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --interval: ")
    assert len(result.stderr.splitlines()) == 1


def test_usage_error_of_screen_command_takes_one_line() -> None:
    result = CliRunner().invoke(screen_app, ["--dmo"], prog_name="gputrain-tui")
    assert (result.exit_code, result.stderr) == (2, "error: --dmo: there is no such option; did you mean --demo?\n")


def test_gputrain_without_arguments_shows_help() -> None:
    result = CliRunner().invoke(app, [], prog_name="gputrain")
    assert "Usage: gputrain [OPTIONS] COMMAND" in result.output
