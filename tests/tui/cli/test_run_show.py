"""`gputrain runs show`: what is printed of a run, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.events import RankFailed, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_events, make_ended_runs, make_run_folder, write_run_record
from support.runs.trained_run import call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    return make_ended_runs(tmp_path, 2)[1]


def facts(text: str) -> dict[str, str]:
    """Map the names of the first lines to their values."""
    lines = text.partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in lines)}


def test_show_says_once_which_direction_of_own_metrics_is_assumed(run: RunFolder) -> None:
    epoch = replace(make_epoch(1), metrics={"worst": 0.5, "f1": 0.5, "my loss": 0.5})
    folder = make_run_folder(run.path.parent, "own", make_run_started(), epoch)
    shown = facts(call("runs", "show", folder.name).stdout)
    assert shown["assumed"] == "higher worst is better; `gputrain runs better worst low` changes it"
    call("runs", "better", "worst", "high")
    assert "assumed" not in facts(call("runs", "show", folder.name).stdout)


def test_show_knows_the_metrics_and_outputs_of_a_task(run: RunFolder) -> None:
    epoch = replace(make_epoch(1), metrics={"mae": 3.0, "r2": 0.5})
    folder = make_run_folder(run.path.parent, "numbers", make_run_started(), epoch)
    folder.config.write_text("task: {name: regression}\n")
    write_run_record(folder)
    shown = facts(call("runs", "show", folder.name).stdout)
    assert "assumed" not in shown and shown["data"].endswith(" numbers")


def test_top5_accuracy_among_five_classes_is_not_shown(run: RunFolder) -> None:
    for classes in (5, 6):
        started = replace(make_run_started(), classes=classes)
        folder = make_run_folder(run.path.parent, f"c{classes}", started, make_epoch(1))
        assert ("val top-5" in facts(call("runs", "show", folder.name).stdout)) is (classes == 6)


def test_show_as_json_forgets_failures_before_a_restart(run: RunFolder) -> None:
    failure = RankFailed(rank=1, device="cpu", cause="out of memory", code="out-of-memory")
    append_events(run, failure, make_run_started(), RunFinished(state="failed", message="the disk is full"))
    run.log.write_text("first\nlast\n")
    shown = json.loads(call("runs", "show", "run-1", "--json").stdout)
    assert shown["remedy"] == ""
    assert shown["failure"] == {"cause": "the disk is full", "code": "", "rank": None, "lines": ["first", "last"]}


def test_show_as_json_names_the_next_command(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    append_events(run, RunFinished(state="stopped"))
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "last.pt").touch()
    assert json.loads(call("runs", "show", "run-1", "--json").stdout)["remedy"] == "gputrain resume run-1"
    monkeypatch.setenv("GPUTRAIN_RUNS", "/elsewhere")
    elsewhere = json.loads(call("runs", "show", run.path, "--json").stdout)["remedy"]
    assert elsewhere == f"gputrain resume run-1 --runs-dir {run.path.parent}"


def test_show_names_the_owner_of_a_live_run(run: RunFolder) -> None:
    live = make_run_folder(run.path.parent, "live", make_run_started())
    ownership = Ownership(live)
    shown = facts(call("runs", "show", "live").stdout)
    ownership.release()
    assert (shown["state"], shown["owner"].split()[0]) == ("running", "process")


def test_show_prints_each_point_of_the_curves(run: RunFolder) -> None:
    points = json.loads(call("runs", "show", run.name, "--curves", "--json").stdout)["points"]
    losses = [(point["step"], point["value"]) for point in points if point["metric"] == "val_loss"]
    printed = call("runs", "show", run.name, "--curves").stdout.splitlines()
    assert losses and len(printed) == len(points) + 1 and printed[0] == "metric,step,epoch,time,value"
