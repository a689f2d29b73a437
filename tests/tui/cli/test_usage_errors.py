"""Usage errors of the command line: one line each, the nearest name or the help, exit code 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from support.messages import says
from tui.cli.main import app, screen_app


@pytest.mark.parametrize(
    ("arguments", "code", "location", "advice"),
    [
        ("runs --nosuch", "unknown-option", "--nosuch", "; see `gputrain runs --help`"),
        ("rnu digits", "unknown-command", "rnu", "; did you mean run?"),
        ("xyzzy", "unknown-command", "xyzzy", "; see `gputrain --help`"),
        ("--verison", "unknown-option", "--verison", "; did you mean --version?"),
        ("tag a +old", "unknown-command", "tag", "; did you mean `gputrain runs tag a +old`?"),
        ("evaluate a --lr 3", "unknown-option", "--lr", "of a training; see `gputrain evaluate --help`"),
        ("data pakc x", "unknown-command", "pakc", "; did you mean pack?"),
        ("stop", "missing-value", "RUN...", "; type one, as in `gputrain stop last`"),
    ],
)
def test_usage_error_takes_one_line(arguments: str, code: str, location: str, advice: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), prog_name="gputrain")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"error: {location}: ") and result.stderr.endswith(f"{advice}\n")
    assert says(result.stderr, code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("queue --json hold x", "hold is a command: write `gputrain queue hold …`; see `gputrain queue --help`"),
        ("runs -n 0", "--count: input should be greater than or equal to 1; see `gputrain runs --help`"),
        ("runs -n x", "--count: input should be a valid integer; see `gputrain runs --help`"),
        ("logs --count", "option '--count' requires an argument"),
    ],
)
def test_usage_error_of_typer_takes_one_line(arguments: str, message: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), prog_name="gputrain")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


def test_usage_error_of_screen_command_takes_one_line() -> None:
    result = CliRunner().invoke(screen_app, ["--dmo"], prog_name="gputrain-tui")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert says(result.stderr, "unknown-option", "error: --dmo: ", "; did you mean --demo?")


def test_gputrain_without_arguments_shows_help() -> None:
    result = CliRunner().invoke(app, [], prog_name="gputrain")
    assert "Usage: gputrain [OPTIONS] COMMAND" in result.output
