"""Copy runs to a folder of MLflow, which keeps each row it gets: every duplicate shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.report.sync.mlflow_store import MlflowSync
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.labels import RunLabels
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, make_losses, make_run_folder, write_config, write_labels
from support.servers.remote_runs import mlflow_points, mlflow_runs

FINISHED = RunFinished(time=90.0, state="finished", message="best accuracy 0.5")


@pytest.fixture
def uri(mlflow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = str(tmp_path / "store")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of runs that have an owner."""
    names: set[str] = set()
    monkeypatch.setattr(RunFolder, "is_owned", lambda folder: folder.name in names)
    return names


def sync_once(folder: RunFolder) -> MlflowSync:
    sync = MlflowSync(folder, None)
    sync.poll()
    sync.close()
    return sync


def only_points(uri: str) -> dict[str, list[tuple[int, float]]]:
    [run] = mlflow_runs(uri)
    return mlflow_points(uri, run.info.run_id)


def steps_of(points: dict[str, list[tuple[int, float]]], name: str = "train/loss") -> list[int]:
    return sorted(step for step, _ in points[name])


def test_finished_run_has_name_params_figures_and_each_step_once(uri: str, tmp_path: Path) -> None:
    events = [make_run_started(5.0), make_losses(1, 10), make_epoch(1), make_losses(11, 20), make_epoch(2), FINISHED]
    folder = make_run_folder(tmp_path / "runs", "flowers-1", *events)
    write_config(folder, {"optim": {"lr": 0.1}, "run": {"epochs": 2}, "notify": {"urls": ["secret"]}})
    sync = sync_once(folder)
    assert (sync.run_state, sync.steps_sent) == ("finished", 20)
    [run] = mlflow_runs(uri)
    assert run.info.run_name == "flowers-1"
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 5000, 90000)
    assert {"optim.lr": "0.1", "optim.name": "sgd", "run.epochs": "2"}.items() <= run.data.params.items()
    assert run.data.params["started.world_size"] == "2"
    assert not any("notify" in key for key in run.data.params)
    assert run.data.tags["gputrain.message"] == "best accuracy 0.5"
    points = only_points(uri)
    assert steps_of(points) == list(range(1, 21))
    assert sorted(points["val/accuracy"]) == [(10, 0.5), (20, 0.5)]
    assert points["summary/best_epoch"] == [(20, 2.0)]
    assert points["summary/best_val_loss"] == [(20, 0.55)]

    assert sync_once(folder).steps_sent == 0, "nothing is new"
    assert only_points(uri) == points
    assert mlflow_runs(uri)[0].info.status == "FINISHED"


def test_live_run_is_continued_by_later_syncs(uri: str, tmp_path: Path, live: set[str]) -> None:
    live.add("a")
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 10))
    sync_once(folder)
    [run] = mlflow_runs(uri)
    assert run.info.status == "RUNNING"
    assert steps_of(only_points(uri)) == list(range(1, 10)), "an epoch may follow step 10"
    append_events(folder, make_epoch(1), make_losses(11, 15))
    sync_once(folder)
    live.clear()
    append_events(folder, make_losses(16, 20), make_epoch(2), FINISHED)
    assert sync_once(folder).steps_sent == 6
    points = only_points(uri)
    assert steps_of(points) == list(range(1, 21))
    assert steps_of(points, "val/loss") == [10, 20]
    assert mlflow_runs(uri)[0].info.status == "FINISHED"


def test_resume_continues_remote_run_after_the_steps_that_were_sent(uri: str, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 18, loss=0.5), make_epoch(1))
    sync_once(folder)
    [crashed] = mlflow_runs(uri)
    assert crashed.info.status == "FAILED"
    resumed = (make_run_resumed(15, time=20.0), make_losses(16, 20, loss=0.25, time=30.0), make_epoch(2), FINISHED)
    append_events(folder, *resumed)
    assert sync_once(folder).steps_sent == 2
    [run] = mlflow_runs(uri)
    assert (run.info.run_id, run.info.status) == (crashed.info.run_id, "FINISHED")
    points = only_points(uri)
    assert sorted(points["train/loss"]) == [(step, 0.5 if step <= 18 else 0.25) for step in range(1, 21)]
    assert steps_of(points, "val/loss") == [18, 20]


def test_changed_value_and_labels_reach_remote_run(uri: str, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 5), FINISHED)
    write_config(folder, {"run": {"epochs": 2}})
    sync_once(folder)
    write_config(folder, {"run": {"epochs": 3}})
    write_labels(folder, RunLabels(tags=("night",), note="keep"))
    assert sync_once(folder).steps_sent == 0
    [run] = mlflow_runs(uri)
    assert (run.data.params["run.epochs"], run.data.tags["changed.run.epochs"]) == ("2", "3")
    assert (run.data.tags["gputrain.tags"], run.data.tags["mlflow.note.content"]) == ("night", "keep")


def test_labels_that_change_while_a_sync_follows_reach_remote_run(uri: str, tmp_path: Path, live: set[str]) -> None:
    live.add("a")
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 10))
    sync = MlflowSync(folder, None)
    sync.poll()
    write_labels(folder, RunLabels(tags=("night",), note="keep"))
    sync.poll()
    [run] = mlflow_runs(uri)
    assert (run.data.tags["gputrain.tags"], run.data.tags["mlflow.note.content"]) == ("night", "keep")
    sync.close()
    assert steps_of(only_points(uri)) == list(range(1, 10))


def test_sync_that_was_killed_before_it_sent_a_row_continues_remote_run(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 5), FINISHED)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MlflowSync, "send", interrupt)
        sync_once(folder)
    sync_once(folder)
    assert steps_of(only_points(uri)) == list(range(1, 6))
