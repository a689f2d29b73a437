"""MLflow's file store."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.watch.folders import find_runs
from engine.watch.mlflow_store import MlflowRun
from engine.watch.points import Point
from support.foreign import values_of


def make_run(folder: Path, **metrics: str) -> Path:
    (folder / "metrics").mkdir(parents=True)
    (folder / "params").mkdir()
    (folder / "meta.yaml").write_text("run_id: a\n")
    for name, lines in metrics.items():
        (folder / "metrics" / name).write_text(lines)
    return folder


def test_mlflow_run_reads_what_mlflow_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(f"file:{tmp_path}/mlruns")
    run_id = client.create_run("0", run_name="first").info.run_id
    client.log_param(run_id, "lr", 0.1)
    client.log_param(run_id, "model/name", "tiny")
    for step in range(3):
        client.log_metric(run_id, "train/loss", 1 / (step + 1), step=step)
        client.log_metric(run_id, "accuracy", step, timestamp=1_800_000_000_500, step=step)
    tags = {"mlflow.parentRunId": run_id}
    nested = client.create_run("0", run_name="second", tags=tags).info.run_id
    client.log_metric(nested, "loss", 1.0)
    run, inner = find_runs(tmp_path).runs
    assert (run.name, run.formats) == (f"mlruns/0/first-{run_id[:8]}", ("mlflow",))
    assert inner.name == f"mlruns/0/first/second-{nested[:8]}"
    reading = run.logs[0].open().poll()
    assert reading.parameters == {"lr": 0.1, "model/name": "tiny"}
    assert values_of(reading.points, "train/loss") == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert reading.points[0] == Point("accuracy", 0, 0.0, None, 1_800_000_000.5)


def test_mlflow_run_follows_growth_and_new_files(tmp_path: Path) -> None:
    source = MlflowRun(make_run(tmp_path, loss="1800000000000 0.5 1\n1800000000000 0.2"))
    assert values_of(source.poll().points, "loss") == [(1, 0.5)]
    with (tmp_path / "metrics" / "loss").open("a") as file:
        file.write("5 2\n")
    (tmp_path / "metrics" / "accuracy").write_text("1 0.75 2\n")
    (tmp_path / "params" / "lr").write_text("1e-3")
    reading = source.poll()
    assert reading.points == [Point("loss", 2, 0.25, None, 1.8e9), Point("accuracy", 2, 0.75)]
    assert reading.parameters == {"lr": 0.001}
    assert source.poll().parameters == {}


def test_mlflow_run_starts_over_when_file_is_replaced(tmp_path: Path) -> None:
    source = MlflowRun(make_run(tmp_path, a="1 1 1\n", b="1 2 1\n"))
    assert len(source.poll().points) == 2
    (tmp_path / "metrics" / "a").write_text("1 5 1\n1 6 2\n")
    readings = [source.poll(), source.poll()]
    assert [reading.drop_from for reading in readings] == [-math.inf, None]
    assert [(point.name, point.value) for point in readings[1].points] == [("a", 5.0), ("a", 6.0), ("b", 2.0)]


def test_mlflow_run_has_ended_when_meta_has_an_end_time(tmp_path: Path) -> None:
    make_run(tmp_path, loss="1 0.5 0\n")
    source = MlflowRun(tmp_path)
    (tmp_path / "meta.yaml").write_text("end_time: null\nrun_id: a\nstatus: 1\n")
    assert not source.poll().has_ended
    (tmp_path / "meta.yaml").write_text("end_time: 1795795510000\nrun_id: a\nstatus: 3\n")
    assert source.poll().has_ended
