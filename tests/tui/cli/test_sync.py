"""`gputrain runs sync` in a process of its own: MLflow in a database, offline runs of W&B, errors, kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.runs.events import Event, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.labels import RunLabels
from support.gputrain_command import Gputrain
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, make_losses, make_run_folder, write_config, write_labels
from support.servers.fake_wandb_server import API_KEY, fake_wandb_server
from support.servers.remote_runs import mlflow_runs, wandb_history, wandb_records
from tui.cli.main import app

FINISHED = RunFinished(time=90.0, state="finished", message="best accuracy 0.5")
# Without a service there, the library that uses it fails.
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SERVICE": "3-1-unix-/gone"}
CONFIG = {"optim": {"lr": 0.1, "name": "sgd"}}


def make_run(gputrain: Gputrain, name: str, *events: Event) -> RunFolder:
    folder = make_run_folder(gputrain.runs, name, *events)
    write_config(folder, CONFIG)
    return folder


def offline_folders(gputrain: Gputrain) -> list[Path]:
    return sorted((gputrain.folder / "state" / "gputrain" / "wandb").glob("offline-run-*"))


def test_sync_sends_several_runs_to_mlflow(gputrain: Gputrain, mlflow: None) -> None:
    uri = str(gputrain.folder / "store")
    make_run(gputrain, "a-1", make_run_started(), make_losses(1, 12), make_epoch(1))
    make_run(gputrain, "b", make_run_started(9.0), make_losses(1, 5), RunFinished(time=12.0, state="failed"))
    environment = gputrain.environment | {"MLFLOW_TRACKING_URI": uri}
    arguments = ["runs", "sync", "a-1", "b", "a-1", "--service", "mlflow", "--experiment", "flowers", "--json"]
    done = CliRunner().invoke(app, arguments, env=environment)
    assert (done.exit_code, done.stderr) == (0, "a-1: crashed, 12 steps sent.\nb: failed, 5 steps sent.\n")
    syncs = json.loads(done.stdout)["syncs"]
    assert [(sync["run"], sync["state"], sync["steps"]) for sync in syncs] == [
        ("a-1", "crashed", 12),
        ("b", "failed", 5),
    ]
    assert all(sync["location"].startswith(f"{uri} experiment flowers run ") for sync in syncs)
    names = {run.info.run_name: run.info.status for run in mlflow_runs(uri, "flowers")}
    assert names == {"a-1": "FAILED", "b": "FAILED"}
    assert not (gputrain.folder / "mlruns").exists()
    again = CliRunner().invoke(app, arguments, env=environment)
    assert (again.exit_code, again.stderr) == (0, "a-1: crashed, nothing new.\nb: failed, nothing new.\n")


@pytest.mark.nightly
def test_offline_run_of_wandb_has_all_steps_and_description(gputrain: Gputrain) -> None:
    pytest.importorskip("wandb")
    events = (make_run_started(5.0), make_losses(1, 12), make_run_resumed(10, time=20.0))
    folder = make_run(gputrain, "a-1", *events, make_losses(11, 20, loss=0.25, time=31.0), make_epoch(2), FINISHED)
    write_labels(folder, RunLabels(tags=("night",), note="keep"))
    done = gputrain("runs", "sync", "a-1", "--service", "wandb", **OFFLINE)
    assert (done.returncode, done.stderr) == (0, "a-1: finished, 20 steps sent.\n")
    [complete] = offline_folders(gputrain)
    rows = wandb_history(complete)
    assert [(row["_step"], row["train/loss"]) for row in rows] == [
        (step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)
    ]
    assert (rows[-1]["_timestamp"], rows[-1]["train/seconds"], rows[-1]["val/accuracy"]) == (31.0, 26.0, 0.5)
    assert [record.exit.exit_code for record in wandb_records(complete) if record.HasField("exit")] == [0]
    described = [record.run for record in wandb_records(complete) if record.HasField("run")][-1]
    assert (described.project, described.display_name) == ("gputrain", "a-1")
    assert (list(described.tags), described.notes) == (["night"], "keep")
    config = {
        item.key: json.loads(item.value_json) for record in wandb_records(complete) for item in record.config.update
    }
    assert (config["optim.lr"], config["optim.name"]) == (0.1, "sgd")


@pytest.mark.nightly
def test_online_run_of_wandb_continues(gputrain: Gputrain) -> None:
    pytest.importorskip("wandb")
    folder = make_run(gputrain, "a", make_run_started(), make_losses(1, 12))
    with fake_wandb_server() as server:
        assert gputrain("runs", "sync", "a", "--service", "wandb", **server.environment).returncode == 0
        [first] = server.runs
        assert (len(server.runs[first].lines), server.runs[first].exit_code) == (12, 1)

        append_events(folder, make_run_resumed(12, time=20.0), make_losses(13, 18, time=21.0))
        done = gputrain("runs", "sync", "a", "--service", "wandb", **server.environment)
        assert done.stderr == "a: crashed, 6 steps sent.\n"
        assert list(server.runs) == [first]
        assert server.runs[first].losses == [(step, 0.5) for step in range(1, 19)]

        append_events(folder, make_run_resumed(17, time=30.0), make_losses(18, 20, loss=0.25, time=31.0), FINISHED)
        done = gputrain("runs", "sync", "a", "--service", "wandb", **server.environment)
        assert done.stderr == "a: finished, 2 steps sent.\n"
        assert done.stdout == f"a  {server.environment['WANDB_BASE_URL']}/me/gputrain/runs/{first}\n"
        assert server.runs[first].losses == [(step, 0.5 if step <= 18 else 0.25) for step in range(1, 21)]
        assert server.runs[first].exit_code == 0

        server.refuses = True
        refused = gputrain("runs", "sync", "a", "--service", "wandb", "--project", "other", **server.environment)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: http://127.0.0.1:")
        assert API_KEY not in refused.stderr + refused.stdout
