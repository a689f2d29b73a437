"""`gputrain compare` and `report` of runs that other programs have recorded, and the commands that refuse them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.runs.events import RunFinished
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.runs.trained_run import call


@pytest.fixture(autouse=True)
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUTRAIN_RUNS", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path / "runs"


def make_log(folder: Path, name: str = "loss", values: tuple[float, ...] = (0.5, 0.25), **parameters: object) -> Path:
    """Write the logs of a run with one metric, one value a step, and its parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"step": step, name: value}) + "\n" for step, value in enumerate(values, 1))
    (folder / "metrics.jsonl").write_text("".join(rows))
    (folder / "hparams.yaml").write_text(json.dumps(parameters))
    return folder


def compared(*arguments: object) -> dict[str, Any]:
    result = call("compare", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def figures(run: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in run["figures"].items() if value is not None}


def test_compare_of_own_and_foreign_run_shares_metrics_of_the_same_meaning(tmp_path: Path, runs_folder: Path) -> None:
    make_run_folder(runs_folder, "own", make_run_started(), make_epoch(1, 0.7), RunFinished(time=20, state="finished"))
    make_log(tmp_path / "other", "val/loss", (0.5, 0.25, 0.3), model="x")
    values = compared("own", "./other", "--baseline", "other")
    own, other = values["runs"]
    assert figures(other) == {"val_loss": 0.3, "best_val_loss": 0.25, "step": 3}
    assert own["difference"]["best_val_loss"] == own["figures"]["best_val_loss"] - 0.25
    assert values["config"] == {} and values["baseline"] == "other"


def test_name_of_own_run_comes_before_a_path_and_its_beginning_is_ambiguous(tmp_path: Path, runs_folder: Path) -> None:
    make_run_folder(runs_folder, "logs", make_run_started())
    make_log(tmp_path / "logs")
    assert "formats" not in compared("logs")["runs"][0]
    assert compared("./logs")["runs"][0]["formats"] == ["json"]
    make_run_folder(runs_folder, "tb-1", make_run_started())
    make_log(tmp_path / "tb")
    result = call("compare", "tb")
    assert result.exit_code == 2 and says(result.stderr, "ambiguous-name", "tb-1", "./tb")
    # A command that takes runs of gputrain only has no second meaning.
    assert call("runs", "show", "tb").exit_code == 0


@pytest.mark.parametrize(
    "command",
    [
        ("stop", "other"),
        ("evaluate", "other"),
        ("runs", "rename", "other", "new"),
    ],
)
def test_command_on_own_runs_refuses_foreign_run_in_one_sentence(
    tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tui.cli.terminal.require_terminal", lambda *_: None)
    make_log(tmp_path / "other")
    before = sorted(path.name for path in (tmp_path / "other").iterdir())
    result = call(*command)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert says(result.stderr, "recorded-elsewhere", "error: other: ", "gputrain watch other")
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before
