"""HOST:RUN in the commands on runs: what is sent to which host, and what of its answer is printed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.runs.trained_run import call
from support.servers.ssh_stand_in import SshStandIn
from tui.cli.main import screen_app

AddHost = Callable[..., None]


@pytest.fixture
def add_host(ssh: SshStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddHost:
    """Add a host where `gputrain` is this line of a shell; the default prints its arguments."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "here" / "runs"))

    def add(name: str, line: str = 'echo "$@"', noise: str = "") -> None:
        own = tmp_path / name
        own.mkdir()
        (own / "gputrain").write_text(f"#!/bin/sh\n{line}\n")
        (own / "gputrain").chmod(0o755)
        ssh.set_host(name, f'export PATH={own}:"$PATH" HOME={own}; unset GPUTRAIN_RUNS', noise)

    return add


def test_command_reaches_host_with_its_options(add_host: AddHost) -> None:
    add_host("lab1")
    add_host("ann@lab-2.org")
    result = call("stop", "lab1:a", "ann@lab-2.org:b", "lab1:c", "--no-wait")
    lines = {"lab1: stop a c --no-wait", "ann@lab-2.org: stop b --no-wait"}
    assert (result.exit_code, set(result.stdout.splitlines())) == (0, lines)


@pytest.mark.parametrize("words", [("wait",), ("logs",), ("runs", "show"), ("runs", "pause"), ("runs", "delete")])
def test_output_and_code_of_host_are_passed_on(add_host: AddHost, words: tuple[str, ...]) -> None:
    add_host("lab1", 'echo "$@"; echo sorry >&2; exit 3', noise="echo Welcome; echo quota >&2")
    result = call(*words, "lab1:last")
    assert (result.exit_code, result.stdout, result.stderr) == (3, f"{shlex.join(words)} last\n", "lab1: sorry\n")


def test_texts_of_host_name_its_runs_as_host_and_run(add_host: AddHost) -> None:
    add_host(
        "lab1",
        """echo "a is stopped; \\`gputrain resume a\\` starts it; \\`gputrain resume\\` too" >&2; echo a failed""",
    )
    said = "lab1:a is stopped; `gputrain resume lab1:a` starts it; `gputrain resume` too\n"
    result = call("stop", "lab1:a")
    assert (result.stderr, result.stdout) == (said, "lab1:a failed\n")
    assert call("logs", "lab1:a").stdout == "a failed\n"


def test_run_of_shared_folder_comes_first(add_host: AddHost, tmp_path: Path) -> None:
    add_host("lab1", 'echo "$GPUTRAIN_RUNS"')
    here, there = tmp_path / "here" / "runs", tmp_path / "lab1" / "runs"
    assert call("logs", "lab1:a").stdout == f"{there}\n"
    for run in (here / "a", here / "b", there / "b", there / "copied"):
        run.mkdir(parents=True)
    assert [call("logs", f"lab1:{run}").stdout.strip() for run in ("a", "b", "last")] == [str(here)] * 3
    assert call("logs", "lab1:copied").stdout == f"{there}\n"


def test_comparison_names_host_that_does_not_answer(add_host: AddHost) -> None:
    add_host("lab1", "echo error: nope: no run of this name >&2; exit 2")
    add_host("lab2", 'echo \'{"format": 9, "state": 1}\'')
    first, second = (call("compare", f"{host}:a", f"{host}:a", "here") for host in ("lab1", "lab2"))
    assert (first.exit_code, first.stderr) == (2, "error: lab1: nope: no run of this name\n")
    assert "error: lab2: its answer has format 9" in second.stderr


def test_worst_code_of_hosts_and_this_one_wins(add_host: AddHost) -> None:
    add_host("lab1", "exit 3")
    add_host("lab2", "exit 0")
    assert call("wait", "lab1:a", "lab2:a").exit_code == 3
    result = call("wait", "lab1:a", "lab2:a", "unknown")
    assert (result.exit_code, "unknown: there are no runs in" in result.stderr) == (2, True)


def test_resumed_run_stays_in_background(add_host: AddHost) -> None:
    add_host("lab1", 'echo "$@"')
    assert call("resume", "lab1:a", "--headless", "--epochs", "3").stdout == "lab1:resume --detach a --epochs 3\n"


def test_escapes_of_host_are_not_printed(add_host: AddHost) -> None:
    add_host("lab1", "printf 'a\\tb\\033[2J\\n'; printf '\\033]0;x\\007\\n' >&2")
    result = call("logs", "lab1:a")
    assert (result.stdout, result.stderr) == ("a\tb\\x1b[2J\n", "lab1: \\x1b]0;x\\x07\n")


def test_unreachable_host_is_told_in_one_line(ssh: SshStandIn) -> None:
    result = call("stop", "gone:a")
    words = "error: gone: ssh: Could not resolve hostname gone: Name or service not known\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("attach", "lab1:a", "lab2:b"), "the screen compares runs of one host"),
        (("wait", "lab1:a", "lab2:b", "--json"), "--json: prints the runs of one host"),
        (("report", "lab1:a"), "report takes runs of this host; there: ssh lab1 gputrain report a"),
        (("stop", "any:a"), "any is a reserved word and no host"),
        (("attach", "lab1:a"), "needs a terminal; without one, run `gputrain runs show lab1:a`"),
    ],
)
def test_what_is_not_possible_is_refused(add_host: AddHost, words: tuple[str, ...], said: str) -> None:
    add_host("lab1")
    add_host("lab2")
    result = call(*words)
    assert (result.exit_code, said in result.stderr, result.stdout) == (2, True, "")


def test_screen_opens_on_run_of_host(add_host: AddHost) -> None:
    add_host("lab1")
    result = CliRunner().invoke(screen_app, ["lab1:a"], prog_name="gputrain-tui")
    assert "needs a terminal; without one, run `gputrain runs show lab1:a`" in result.stderr


def test_path_with_colon_is_no_host(ssh: SshStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp:1").mkdir()
    assert "lab" not in call("compare", "exp:1", "./lab:1").stderr.replace("./lab:1", "")
    assert not ssh.calls
