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


def test_value_that_no_command_has_finds_no_run() -> None:
    result = call("runs", "hidden=9")
    assert result.exit_code == 0 and not result.stdout and "None of the 3 runs" in result.stderr


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
        "val_acc=0.625", "val_accuracy=0.625", '"val acc"=0.625', "best_val_acc=0.625", '"best val acc"=0.625',
        "loss=0.25", "val_loss=0.5", "eval_loss=0.5", '"best val loss"=0.5',
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


def test_list_of_commands_has_steps_and_their_loss() -> None:
    header, line, _ = (
        line.split() for line in call("runs", "command~torchrun", "--sort", "hidden").stdout.splitlines()
    )
    assert header == ["name", "state", "step", "loss", "hidden", "age", "command"]
    assert line[:4] == ["small", "finished", "9", "0.1000"]


def test_list_of_commands_and_trainings_names_no_epochs_of_commands() -> None:
    header, *lines = call("runs").stdout.splitlines()
    assert "progress" in header and "epochs" not in header and "loss" in header
    assert "step 9" in " ".join(lines) and "1/" in " ".join(lines)
    assert "epochs" in call("runs", "digits").stdout.splitlines()[0]


def test_compare_marks_no_winner_of_equal_values(runs: Path) -> None:
    for name, loss in (("a", 0.25), ("b", 0.25000001)):
        make_command_run(runs, name, make_command_finished(time.time()), now=time.time(), rows=[{"loss": loss}])
    lines = call("compare", "a", "b").stdout.splitlines()
    assert not [line for line in lines if line.startswith(("loss", "best loss")) and "*" in line]
    assert not [line for line in lines if line.startswith("GPUs")]


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
