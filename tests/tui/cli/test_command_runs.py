"""Runs of commands in `gputrain runs`, `gputrain compare` and `gputrain report`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("query", ["hidden>10", "command.hidden>10"])
def test_runs_are_found_by_parameters_of_their_commands(query: str) -> None:
    assert call("runs", *query.split(), "--quiet").stdout.split() == ["large"]


def test_parameters_and_metrics_of_commands_are_columns_and_orders() -> None:
    lines = call("runs", "small", "--columns", "name,hidden,metrics.loss,step,command").stdout.splitlines()
    assert lines[0].split() == ["name", "hidden", "loss", "step", "command"]
    assert lines[1].split()[:4] == ["small", "8", "0.1000", "9"]
    assert call("runs", "command~torchrun", "--sort", "hidden", "--quiet").stdout.split() == ["small", "large"]


PRINTED = [{"loss": 0.5, "val_loss": 0.75, "val_acc": 0.25}, {"loss": 0.25, "val_loss": 0.5, "val_acc": 0.625}]


@pytest.fixture
def printed(runs: Path) -> None:
    """A command that prints other names than the keys of its metrics."""
    end = make_command_finished(time.time())
    make_command_run(runs, "printed", end, now=time.time(), rows=PRINTED, parameters={"lr": 0.1})


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize(
    "condition",
    [
        "val_acc=0.625", "val_accuracy=0.625", '"best val acc"=0.625', "loss=0.25",
    ],
)  # fmt: skip
def test_metric_has_the_name_that_the_command_prints_its_key_and_its_heading(condition: str) -> None:
    assert call("runs", condition, "--quiet").stdout.split() == ["printed"]


@pytest.mark.usefixtures("printed")
def test_column_has_the_heading_and_the_values_of_the_name_that_was_typed() -> None:
    header, *lines = call(
        "runs", "--columns", "name,loss,val_acc,best val acc", "--sort", "val_acc"
    ).stdout.splitlines()
    assert header.split() == ["name", "loss", "val_acc", "best", "val", "acc"]
    rows = {name: values for name, *values in map(str.split, lines)}
    assert (rows["printed"], rows["small"]) == (["0.2500", "0.6250", "0.6250"], ["0.1000", "–", "–"])
    assert rows["digits"][1:] == ["0.5000", "0.5000"] and lines[-1].split()[0] in ("small", "large")


@pytest.mark.usefixtures("printed")
def test_own_metric_of_that_name_is_shown_where_it_has_no_key(runs: Path) -> None:
    rows = [{"val_acc": 25.0, "val_loss": 0.5}]
    make_command_run(runs, "percent", make_command_finished(time.time()), now=time.time(), rows=rows)
    found = json.loads(call("runs", "--columns", "val_acc,best_val_acc", "--json", "--sort", "name").stdout)["runs"]
    columns = {run["name"]: run["columns"] for run in found}
    assert columns["percent"] == {"val_acc": 25.0, "best_val_acc": 25.0}
    assert columns["printed"] == {"val_acc": 0.625, "best_val_acc": 0.625}


def test_command_is_compared_with_a_training() -> None:
    found = json.loads(call("compare", "digits", "small", "--json").stdout)
    assert found["runs"][0]["figures"]["epochs"] == 1 and found["runs"][1]["figures"]["metrics.loss"] == 0.1
    result = call("compare", "digits", "small", "--baseline", "small")
    assert result.exit_code == 0
