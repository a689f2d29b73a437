"""`gputrain runs sync` in a process of its own: MLflow in a database, offline runs of W&B, errors, kills."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.runs.events import Event, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.labels import RunLabels
from support.gputrain_command import Gputrain, effective_events, wait_for
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, make_losses, make_run_folder, write_labels
from support.servers.fake_wandb_server import API_KEY, fake_wandb_server
from support.servers.remote_runs import mlflow_points, mlflow_runs, wandb_history, wandb_records, wandb_run_id
from tui.cli.main import app

FINISHED = RunFinished(time=90.0, state="finished", message="best accuracy 0.5")
# Without a service there, the library that uses it fails.
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SERVICE": "3-1-unix-/gone"}
CONFIG = "optim: {lr: 0.1, name: sgd}\n"


def make_run(gputrain: Gputrain, name: str, *events: Event) -> RunFolder:
    folder = make_run_folder(gputrain.runs, name, *events)
    folder.config.write_text(CONFIG)
    return folder


@contextmanager
def owned(folder: RunFolder) -> Iterator[None]:
    """Own a run, so that it is live."""
    with folder.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def offline_folders(gputrain: Gputrain) -> list[Path]:
    return sorted((gputrain.folder / "state" / "gputrain" / "wandb").glob("offline-run-*"))


def stored_step(folder: RunFolder, service: str) -> int:
    try:
        [entry] = json.loads((folder.sync / f"{service}.json").read_text())["remotes"].values()
    except FileNotFoundError:
        return 0
    return int(entry["sent_step"])


def exit_codes(folder: Path) -> list[int]:
    return [record.exit.exit_code for record in wandb_records(folder) if record.HasField("exit")]


def test_sync_sends_several_runs_to_mlflow(gputrain: Gputrain, mlflow: None) -> None:
    uri = str(gputrain.folder / "store")
    make_run(gputrain, "a-1", make_run_started(), make_losses(1, 12), make_epoch(1))
    make_run(gputrain, "b", make_run_started(), make_losses(1, 5), RunFinished(time=12.0, state="failed"))
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
def test_followed_offline_run_of_wandb_survives_kill_interrupt_and_resume(gputrain: Gputrain) -> None:
    pytest.importorskip("wandb")
    folder = make_run(gputrain, "a-1", make_run_started(5.0), make_losses(1, 12))
    command: dict[str, Any] = {"env": gputrain.environment | OFFLINE}
    with owned(folder):
        killed = gputrain.start("runs", "sync", "a-1", "--service", "wandb", "--follow", **command)
        wait_for(lambda: stored_step(folder, "wandb") == 11, "the first steps")
        killed.kill()
        killed.communicate()
        [incomplete] = offline_folders(gputrain)
        assert exit_codes(incomplete) == []

        followed = gputrain.start("runs", "sync", "a-1", "--service", "wandb", "--follow", **command)
        wait_for(lambda: incomplete not in offline_folders(gputrain), "the removal of the incomplete folder")
        wait_for(lambda: stored_step(folder, "wandb") == 11, "the first steps")
        # This resume voids step 11, which was sent.
        append_events(folder, make_run_resumed(10, time=20.0), make_losses(11, 16, loss=0.25, time=30.0))
        wait_for(lambda: stored_step(folder, "wandb") == 15, "the steps after the resume")
        followed.send_signal(signal.SIGINT)
        output, errors = followed.communicate(timeout=60)
        assert followed.returncode == 0, errors
        assert "a-1: a resume repeats steps that were sent, so its remote run was replaced." in errors
        [interrupted] = offline_folders(gputrain)
        assert output.splitlines()[-1] == f"a-1  {interrupted}"
        assert len(wandb_history(interrupted)) == 15
        assert errors.endswith("a-1: running, 26 steps sent; repeat the command to send the rest.\n")
    write_labels(folder, RunLabels(tags=("night",), note="keep"))
    append_events(folder, make_losses(17, 20, loss=0.25, time=31.0), make_epoch(2), FINISHED)
    done = gputrain("runs", "sync", "a-1", "--service", "wandb", **OFFLINE)
    assert (done.returncode, done.stderr) == (0, "a-1: finished, 20 steps sent.\n")
    [complete] = offline_folders(gputrain)
    rows = wandb_history(complete)
    assert [(row["_step"], row["train/loss"]) for row in rows] == [
        (step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)
    ]
    assert (rows[-1]["_timestamp"], rows[-1]["train/seconds"], rows[-1]["val/accuracy"]) == (31.0, 26.0, 0.5)
    assert exit_codes(complete) == [0]
    described = [record.run for record in wandb_records(complete) if record.HasField("run")][-1]
    assert (described.project, described.display_name, described.host) == ("gputrain", "a-1", "h")
    assert (list(described.tags), described.notes) == (["night"], "keep")
    config = {
        item.key: json.loads(item.value_json) for record in wandb_records(complete) for item in record.config.update
    }
    assert config["optim"] == {"lr": 0.1, "name": "sgd"}
    assert not (gputrain.folder / "wandb").exists()

    # What `wandb sync` has uploaded stays, and its ID is not used again.
    next(complete.glob("*.wandb")).with_suffix(".wandb.synced").touch()
    write_labels(folder, RunLabels())
    assert gputrain("runs", "sync", "a-1", "--service", "wandb", **OFFLINE).returncode == 0
    [successor] = set(offline_folders(gputrain)) - {complete}
    assert complete.exists()
    assert len(wandb_history(successor)) == 20
    assert wandb_run_id(successor) != wandb_run_id(complete)


@pytest.mark.nightly
def test_online_run_of_wandb_continues_and_gets_successor_when_resume_voids_steps(gputrain: Gputrain) -> None:
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

        append_events(folder, make_run_resumed(10, time=30.0), make_losses(11, 20, loss=0.25, time=31.0), FINISHED)
        done = gputrain("runs", "sync", "a", "--service", "wandb", **server.environment)
        assert done.stderr == "a: finished, 20 steps sent.\n"
        [successor] = set(server.runs) - {first}
        assert done.stdout == f"a  {server.environment['WANDB_BASE_URL']}/me/gputrain/runs/{successor}\n"
        assert server.runs[successor].losses == [(step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)]
        assert (server.runs[successor].exit_code, server.runs[first].tags) == (0, ["void"])

        server.refuses = True
        refused = gputrain("runs", "sync", "a", "--service", "wandb", "--project", "other", **server.environment)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: W&B at http://127.0.0.1:")
        assert API_KEY not in refused.stderr + refused.stdout


@pytest.mark.nightly
def test_services_that_cannot_be_used_are_told_in_one_sentence(gputrain: Gputrain) -> None:
    pytest.importorskip("wandb")
    folder = make_run(gputrain, "a", make_run_started(), make_losses(1, 5), FINISHED)
    server = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1", "WANDB_MODE": "online"}
    nameless = gputrain("runs", "sync", "a", "--service", "wandb", WANDB_API_KEY="", **server)
    assert nameless.returncode == 1
    assert says(nameless.stderr, "service-failed", "error: W&B at http://127.0.0.1:9 ")
    assert "api" in nameless.stderr.lower()
    gone = gputrain("runs", "sync", "a", "--service", "wandb", WANDB_API_KEY="0123456789" * 4, **server)
    assert gone.returncode == 1
    assert len(gone.stderr.splitlines()) == 2
    assert gone.stderr.startswith("error: W&B at http://127.0.0.1:9 ") and "WANDB_MODE=offline" in gone.stderr
    assert "0123456789" not in gone.stderr + (folder.sync / "wandb.json").read_text()


def test_sync_refuses_unknown_service_and_run(gputrain: Gputrain) -> None:
    make_run(gputrain, "a", make_run_started())
    unknown = CliRunner().invoke(app, ["runs", "sync", "a", "--service", "wand"], env=gputrain.environment)
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    assert says(unknown.stderr, "unknown-value", "error: --service: wand ", "did you mean wandb?")
    missing = CliRunner().invoke(app, ["runs", "sync", "b", "--service", "wandb"], env=gputrain.environment)
    assert (missing.exit_code, missing.stdout) == (2, "")


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_training_and_syncs_killed_at_random_leave_each_step_once(gputrain: Gputrain, mlflow: None) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{gputrain.folder}/mlflow.db"
    services = {"mlflow": {"MLFLOW_TRACKING_URI": uri}, "wandb": OFFLINE}
    random = Random(5)  # noqa: S311
    run = ["digits", "--name", "d", "--ranks", "1", "--epochs", "300", "run.log_every=7"]
    config = ["checkpoint.every_steps=60"]
    training = gputrain.start("run", "--headless", *run, *config)
    gputrain.wait_for_event("d", "step")
    folder = RunFolder(gputrain.runs / "d")
    syncs = {to: follow(gputrain, to, variables) for to, variables in services.items()}
    for killed in ("wandb", "training", "mlflow", "wandb", "training", "mlflow"):
        time.sleep(random.uniform(0.5, 5))
        if killed != "training":
            syncs[killed].kill()
            syncs[killed].communicate()
            syncs[killed] = follow(gputrain, killed, services[killed])
            continue
        training.kill()
        training.communicate()
        for sync in syncs.values():
            sync.communicate(timeout=300)
        training = gputrain.start("resume", "d", "--headless")
        wait_for(lambda: folder.is_owned(), "the resumed run")
        syncs = {to: follow(gputrain, to, variables) for to, variables in services.items()}
    _, errors = training.communicate(timeout=900)
    assert training.returncode == 0, errors
    for sync in syncs.values():
        _, errors = sync.communicate(timeout=300)
        assert sync.returncode == 0, errors
    expected = {}
    for event in effective_events(folder.path):
        if event["type"] == "step":
            first = event["step"] - len(event["losses"]) + 1
            expected |= dict(enumerate(event["losses"], first))
    [remote] = mlflow_runs(uri)
    points = mlflow_points(uri, remote.info.run_id)
    assert sorted(points["train/loss"]) == sorted(expected.items())
    assert len(points["val/accuracy"]) == 300
    [complete] = offline_folders(gputrain)
    assert [(row["_step"], row["train/loss"]) for row in wandb_history(complete)] == sorted(expected.items())


def follow(gputrain: Gputrain, to: str, variables: dict[str, str]) -> subprocess.Popen[str]:
    return gputrain.start("runs", "sync", "d", "--service", to, "--follow", env=gputrain.environment | variables)
