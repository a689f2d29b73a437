"""Runs of commands in `gputrain runs`, `gputrain compare` and `gputrain report`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.messages import says
from support.runs.command_folder import make_command_finished, make_command_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.runs.trained_run import call


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commands, and a training beside them."""
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, hidden in (("small", 8), ("large", 64)):
        rows = [{"loss": 8 / (hidden * (step + 1))} for step in range(10)]
        make_command_run(
            tmp_path / "runs", name, make_command_finished(time.time()), now=time.time(), rows=rows,
            parameters={"lr": 0.1, "hidden": hidden},
        )  # fmt: skip
    make_run_folder(tmp_path / "runs", "digits", make_run_started(), make_epoch(1))
    return tmp_path / "runs"


@pytest.mark.parametrize("query", ["hidden>10", "command.hidden>10", "hidden=64 lr=0.1", "hidden=6*"])
def test_runs_are_found_by_parameters_of_their_commands(query: str) -> None:
    assert call("runs", *query.split(), "--quiet").stdout.split() == ["large"]


def test_unknown_parameter_of_a_command_is_refused_with_the_nearest_one() -> None:
    result = call("runs", "hiden>3")
    assert result.exit_code == 2 and says(result.stderr, "unknown-key", "hiden") and "hidden" in result.stderr


def test_parameters_and_metrics_of_commands_are_columns_and_orders() -> None:
    lines = call("runs", "small", "--columns", "name,hidden,metrics.loss,step,command").stdout.splitlines()
    assert lines[0].split() == ["name", "hidden", "loss", "step", "command"]
    assert lines[1].split()[:4] == ["small", "8", "0.1000", "9"]
    assert call("runs", "command~torchrun", "--sort", "hidden", "--quiet").stdout.split() == ["small", "large"]


def test_loss_of_a_command_is_what_it_calls_so() -> None:
    assert call("runs", "loss<0.05", "--quiet").stdout.split() == ["large"]


def test_compare_shows_parameters_and_metrics_of_commands() -> None:
    found = json.loads(call("compare", "small", "large", "--json").stdout)
    assert found["config"] == {"hidden": [8, 64]}
    assert [run["state"] for run in found["runs"]] == ["finished", "finished"]
    assert [run["figures"]["metrics.loss"] for run in found["runs"]] == [0.1, 0.0125]
    assert all(run["figures"]["seconds"] == pytest.approx(3000, abs=2) for run in found["runs"])


def test_command_is_compared_with_a_training() -> None:
    found = json.loads(call("compare", "digits", "small", "--json").stdout)
    assert found["runs"][0]["figures"]["epochs"] == 1 and found["runs"][1]["figures"]["metrics.loss"] == 0.1
    result = call("compare", "digits", "small", "--baseline", "small")
    assert result.exit_code == 0


def test_report_has_curves_and_parameters_of_commands(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call("report", "small", "digits", "-o", page).exit_code == 0
    text = page.read_text()
    assert "hidden" in text and ">loss<" in text


def test_report_draws_the_curves_of_a_command(tmp_path: Path) -> None:
    assert call("report", "small", "large", "--metric", "loss", "-o", tmp_path / "loss.svg").exit_code == 0
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
