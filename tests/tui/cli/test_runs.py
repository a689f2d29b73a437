"""`gputrain attach` and `gputrain logs`: the lines of a log that are printed, and what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.jobs.command.terminal import Terminal as CommandTerminal
from engine.runs.folder import RunFolder
from support.gputrain_command import GPUTRAIN, Gputrain
from support.messages import says
from support.runs.factories import make_ended_runs
from support.runs.trained_run import call
from support.screen.terminal import Terminal


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    make_ended_runs(tmp_path, 2)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ((), "first\nsecond\nthird"),
        (("--count", "1", "--follow"), "third"),
        (("-f", "-n", "1000000000"), "first\nsecond\nthird"),
    ],
)
def test_logs_prints_the_last_lines_of_an_ended_run(root: Path, options: tuple[str, ...], printed: str) -> None:
    RunFolder(root / "run-0").log.write_text("first\nsecond\nthird")
    result = call("logs", "run-0", *options)
    assert (result.exit_code, result.stdout, result.stderr) == (0, printed, "")


@pytest.mark.parametrize("no_color", [False, True])
def test_logs_shows_colors_on_a_terminal_and_escapes_the_rest(
    root: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    RunFolder(root / "run-0").log.write_text("\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07\n")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = CommandTerminal()
    command = [GPUTRAIN, "logs", "run-0"]
    with subprocess.Popen(command, stdin=terminal.stdin, stdout=terminal.stdout, stderr=terminal.stdout):
        terminal.close_child_side()
    (line,) = terminal.close()
    red = "red" if no_color else "\x1b[0;31mred\x1b[0m"
    assert line == f"{red} \\x1b[2J\\x1b]0;title\\x07"


@pytest.mark.parametrize("runs", [(), ("run-0", "run-1")])
def test_attach_without_terminal_refuses(root: Path, runs: tuple[str, ...]) -> None:
    result = call("attach", *runs)
    assert result.exit_code == 2
    words = " ".join(runs) or "last"
    command = f"`gputrain {'compare' if len(runs) > 1 else 'runs show'} {words}`"
    assert says(result.stderr, "no-terminal", command) and result.stderr.count("\n") == 1


def test_attach_of_several_runs_opens_their_comparison(gputrain: Gputrain) -> None:
    make_ended_runs(gputrain.runs, 2)
    terminal = Terminal(gputrain, GPUTRAIN, "attach", "run-0", "run-1")
    terminal.wait_for("compare 2 runs")
    terminal.press("q")
    assert terminal.wait_for_end() == 0
    terminal.hang_up()
