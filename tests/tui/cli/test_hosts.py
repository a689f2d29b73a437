"""`gputrain gpus --hosts` and `gputrain runs --hosts`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.base.files import settings_file
from support.messages import says
from support.servers.ssh_stand_in import CHANGED_WORDS, HOST_KEY_CHANGED, SshStandIn, run_line, snapshot_line
from tui.cli.console import json_line
from tui.cli.main import app


@pytest.fixture(autouse=True)
def lab(ssh: SshStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two hosts that answer, which share a folder of runs, and one that cannot be reached."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    listed = json_line({"listed": 2})
    for name in ("lab1", "lab2"):
        runs = [run_line("first", "lab1"), run_line("second", "lab2"), listed]
        ssh.add_gputrain(name, snapshot_line(name), "".join(f"{line}\n" for line in runs))
    ssh.set_host("rekeyed", HOST_KEY_CHANGED)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_gpus_of_hosts_are_below_their_names() -> None:
    result = call("gpus", "--hosts", "lab1,rekeyed")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if line] == ["lab1", "GPU", "0", "1", "rekeyed"]
    assert lines[-1] == f"rekeyed   down: {CHANGED_WORDS}"
    assert result.exit_code == 0


def test_gpus_of_hosts_as_json() -> None:
    result = json.loads(call("gpus", "--hosts", "lab1,rekeyed", "--json").stdout)
    assert [(host["name"], host["state"], host["must_ask"]) for host in result["hosts"]] == [
        ("lab1", "ok", False),
        ("rekeyed", "down", True),
    ]
    assert len(result["hosts"][0]["snapshot"]["gpus"]) == 2


def test_no_answer_of_any_host_is_failure() -> None:
    assert call("gpus", "--hosts", "rekeyed").exit_code == 1
    result = call("runs", "--hosts", "rekeyed")
    assert (result.exit_code, result.stderr) == (1, f"rekeyed: down: {CHANGED_WORDS}\n")


def test_runs_of_shared_folder_are_listed_once_at_their_host() -> None:
    assert call("runs", "--hosts", "lab1,lab2", "--quiet").stdout.split() == ["lab1:first", "lab2:second"]


def test_runs_of_hosts_take_conditions_and_json() -> None:
    result = json.loads(call("runs", "--hosts", "lab1,lab2", "second", "--json").stdout)
    assert [(run["name"], run["folder"]) for run in result["runs"]] == [("lab2:second", "/runs/second")]


def test_hosts_of_settings_are_all() -> None:
    assert says(call("gpus", "--hosts", "all").stderr, "not-found", settings_file())
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("hosts: [lab2]\n")
    assert call("runs", "--hosts", "all", "-q").stdout.split() == ["lab2:first", "lab2:second"]


@pytest.mark.parametrize("option", ["--record=x", "--count=2", "--interval=5"])
def test_options_of_this_host_are_refused(option: str) -> None:
    result = call("gpus", "--hosts", "lab1", option)
    assert result.exit_code == 2 and says(result.stderr, "conflict", "--hosts", option.partition("=")[0])
