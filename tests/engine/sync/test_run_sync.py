"""Copy runs to a folder of MLflow, which keeps each row it gets: every duplicate shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from engine.runs.labels import RunLabels
from engine.sync.mlflow_store import MlflowRun, MlflowStore
from engine.sync.remote import SyncError
from engine.sync.rows import Row
from engine.sync.run_sync import RunSync, sync_runs
from engine.sync.state import StateFile, open_state
from support.messages import raises_problem
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_events, make_losses, make_run_folder, write_labels
from support.servers.remote_runs import mlflow_client, mlflow_points, mlflow_runs

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


def sync_once(folder: RunFolder, **options: Any) -> RunSync:
    with open_state(folder, "mlflow") as state:
        sync = RunSync(folder, MlflowStore(None), state, **options)
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
    folder.config.write_text("optim: {lr: 0.1, name: sgd}\nrun: {epochs: 2, name: null}\nnotify: {urls: [secret]}\n")
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

    before = folder.journal.parent / "sync" / "mlflow.json"
    stored = before.read_text()
    assert sync_once(folder).steps_sent == 0, "nothing is new"
    assert before.read_text() == stored


def test_sync_of_run_without_news_does_not_read_its_journal(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(5.0), make_losses(1, 10), make_epoch(1), FINISHED)
    sync_once(folder)
    monkeypatch.delattr(JournalReader, "poll_lines")
    assert sync_once(folder).run_state == "finished"


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


def test_resume_that_repeats_sent_steps_replaces_remote_run(uri: str, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 18, loss=0.5), make_epoch(1))
    sync_once(folder)
    [crashed] = mlflow_runs(uri)
    assert crashed.info.status == "FAILED"
    append_events(
        folder, make_run_resumed(10, time=20.0), make_losses(11, 20, loss=0.25, time=30.0), make_epoch(2), FINISHED
    )
    assert sync_once(folder).replaced
    [run] = mlflow_runs(uri)
    assert run.info.run_id != crashed.info.run_id
    assert mlflow_client(uri).get_run(crashed.info.run_id).info.lifecycle_stage == "deleted"
    points = only_points(uri)
    assert sorted(points["train/loss"]) == [(step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)]
    assert steps_of(points, "val/loss") == [10, 20]


def test_resume_after_last_sent_step_continues_remote_run(uri: str, tmp_path: Path) -> None:
    stopped = RunFinished(time=12.0, state="stopped")
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 12), stopped)
    sync_once(folder)
    [before] = mlflow_runs(uri)
    assert before.info.status == "KILLED"
    append_events(folder, make_run_resumed(12, time=20.0), make_losses(13, 20, time=30.0), FINISHED)
    sync = sync_once(folder)
    assert (sync.replaced, sync.steps_sent) == (False, 8)
    [after] = mlflow_runs(uri)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
    assert steps_of(only_points(uri)) == list(range(1, 21))


def test_followed_run_that_resumes_shows_each_step_once(uri: str, tmp_path: Path, live: set[str]) -> None:
    live.add("a")
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 18, loss=0.5))
    with open_state(folder, "mlflow") as state:
        sync = RunSync(folder, MlflowStore(None), state)
        assert not sync.poll()
        # The ranks restart while the sync runs, and this resume repeats steps.
        append_events(folder, make_run_resumed(10, time=20.0), make_losses(11, 15, loss=0.25, time=30.0))
        assert not sync.poll()
        append_events(folder, make_losses(16, 20, loss=0.25, time=31.0), make_epoch(2), FINISHED)
        live.clear()
        assert sync.poll()
    points = only_points(uri)
    assert sorted(points["train/loss"]) == [(step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)]


def test_sync_killed_at_any_write_of_its_state_duplicates_nothing(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sync.run_sync.BATCH_ROWS", 7)
    events = [make_run_started(), make_losses(1, 10), make_epoch(1), make_losses(11, 18)]
    more = [make_run_resumed(14, time=20.0), make_losses(15, 25, loss=0.25, time=30.0), make_epoch(2), FINISHED]
    folder = make_run_folder(tmp_path, "a", *events)
    write, writes = StateFile.write, [0, 0]

    def write_or_die(self: StateFile, *arguments: Any) -> None:
        writes[0] += 1
        if writes[0] >= writes[1]:
            # Every kill lets the next sync come one write further.
            raise KeyboardInterrupt
        write(self, *arguments)

    for continuation in ([], more):
        append_events(folder, *continuation)
        for writes[1] in range(1, 14):
            writes[0] = 0
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(StateFile, "write", write_or_die)
                sync_once(folder)
    sync_once(folder)
    points = only_points(uri)
    assert sorted(points["train/loss"]) == [(step, 0.5 if step <= 14 else 0.25) for step in range(1, 26)]
    assert all(len(rows) == len({step for step, _ in rows}) for rows in points.values()), points


def test_stopped_sync_continues_where_it_was(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sync.run_sync.BATCH_ROWS", 5)
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 8), make_losses(9, 20), FINISHED)
    answers = iter([False, True, True])
    sync_once(folder, stop=lambda: next(answers))
    assert steps_of(only_points(uri)) == [1, 2, 3, 4, 5]
    sync_once(folder)
    assert steps_of(only_points(uri)) == list(range(1, 21))


def test_remote_run_that_somebody_deleted_is_created_again(uri: str, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 12))
    sync_once(folder)
    mlflow_client(uri).delete_run(mlflow_runs(uri)[0].info.run_id)
    append_events(folder, make_run_resumed(12, time=20.0), make_losses(13, 20, time=30.0), FINISHED)
    sync_once(folder)
    assert steps_of(only_points(uri)) == list(range(1, 21))


def test_renamed_and_labeled_run_keeps_its_remote_run(uri: str, tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 12), FINISHED)
    folder.config.write_text("optim: {lr: 0.1}\n")
    sync_once(folder)
    folder.path.rename(tmp_path / "b")
    renamed = RunFolder(tmp_path / "b")
    renamed.config.write_text("optim: {lr: 0.2}\n")
    write_labels(renamed, RunLabels(tags=("night", "best"), note="keep"))
    sync_once(renamed)
    [run] = mlflow_runs(uri)
    assert run.info.run_name == "b"
    assert (run.data.tags["gputrain.tags"], run.data.tags["mlflow.note.content"]) == ("night, best", "keep")
    assert (run.data.params["optim.lr"], run.data.tags["changed.optim.lr"]) == ("0.1", "0.2")
    assert steps_of(only_points(uri)) == list(range(1, 13))


def test_second_sync_of_same_run_is_refused(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    with (
        open_state(folder, "mlflow"),
        open_state(folder, "wandb"),
        raises_problem("already-running", "a", "mlflow"),
        open_state(folder, "mlflow"),
    ):
        pass


def test_damaged_state_counts_as_none(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    with open_state(folder, "mlflow") as state:
        first = state.read("x")
        state.write("x", first)
    path = folder.sync / "mlflow.json"
    stored = json.loads(path.read_text())
    remotes: list[object] = [3, *({"x": {"token": token}} for token in ("../x", f"{first.token}\n", 1))]
    damages = [*(json.dumps(stored | {"remotes": remote}) for remote in remotes), json.dumps(stored | {"format": 2})]
    for damage in ("", "[]", *damages):
        path.write_text(damage)
        with open_state(folder, "mlflow") as state:
            read = state.read("x")
        assert re.fullmatch("[0-9a-f]{16}", read.token)
        assert read.token != first.token
    stored["remotes"]["x"]["sent_step"] = True
    path.write_text(json.dumps(stored))
    with open_state(folder, "mlflow") as state:
        assert state.read("x") == first


def test_state_of_run_that_others_can_change_is_in_state_folder(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 12), FINISHED)
    folder.path.chmod(0o777)
    sync_once(folder)
    assert not folder.sync.exists()
    assert len(list((tmp_path / "state" / "gputrain" / "sync").glob("*/mlflow.json"))) == 1
    assert sync_once(folder).steps_sent == 0


def test_followed_run_waits_for_service_that_is_gone(
    uri: str, tmp_path: Path, live: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sync.run_sync.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("engine.sync.run_sync.POLL_SECONDS", 0.0)
    live.add("a")
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 12))
    rounds, interruptions, send = [], [], MlflowRun.send

    def fail_once(remote: MlflowRun, rows: Sequence[Row]) -> None:
        if not interruptions:
            raise SyncError("MLflow cannot be reached", temporary=True, code="connection-failed")
        send(remote, rows)

    def progress(sync: RunSync, complete: bool) -> None:
        rounds.append(complete)
        if len(rounds) == 1:
            monkeypatch.setattr(MlflowRun, "send", fail_once)
            append_events(folder, make_losses(13, 20), FINISHED)
            live.clear()

    with open_state(folder, "mlflow") as state:
        syncs = [RunSync(folder, MlflowStore(None), state)]
        handlers: dict[str, Any] = {"on_progress": progress, "on_interruption": interruptions.append}
        sync_runs(syncs, follow=True, stop=lambda: False, **handlers)
    assert rounds == [False, True]
    assert [str(error) for error in interruptions] == ["MLflow cannot be reached"]
    assert steps_of(only_points(uri)) == list(range(1, 21))


def test_every_sync_is_closed_where_one_cannot_be(
    uri: str, tmp_path: Path, live: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []

    def leave(remote: MlflowRun) -> None:
        left.append(remote)
        raise SyncError("MLflow cannot be reached", temporary=True, code="connection-failed")

    monkeypatch.setattr(MlflowRun, "leave", leave)
    live |= {"a", "b"}
    folders = [make_run_folder(tmp_path, name, make_run_started(), make_losses(1, 12)) for name in ("a", "b")]
    with open_state(folders[0], "mlflow") as first, open_state(folders[1], "mlflow") as second:
        syncs = [
            RunSync(folder, MlflowStore(None), state) for folder, state in zip(folders, (first, second), strict=True)
        ]
        handlers: dict[str, Any] = {"on_progress": lambda *_: None, "on_interruption": lambda _: None}
        with pytest.raises(SyncError, match="MLflow"):
            sync_runs(syncs, follow=False, stop=lambda: False, **handlers)
    assert len(left) == 2
