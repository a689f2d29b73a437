"""W&B's offline files: those of the real library, and damaged, large and growing ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.watch.folders import find_runs
from engine.watch.points import Point
from engine.watch.reading import MAX_METRICS
from engine.watch.wandb_log import BLOCK_BYTES, FILE_HEADER, MAX_RECORD_BYTES, WandbLog
from support.foreign import field, points_of, values_of, wandb_file, wandb_record

ROWS = [{"_step": step, "_timestamp": 1.8e9 + step, "_runtime": step, "loss": 1 / (step + 1)} for step in range(3000)]
LOSSES = [(step, 1 / (step + 1)) for step in range(3000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run-a.wandb"


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        run = wandb.init(project="p", dir=folder, config={"lr": 0.1, "model": {"name": "tiny", "widths": [8, 16]}})
        for step in range(500):
            run.log({"loss": 1 / (step + 1), "val": {"accuracy": step}, "note": "text", "ok": True, "bad": math.nan})
        run.config.update({"epochs": 3})
        run.finish()
    return folder


@pytest.mark.nightly
def test_wandb_log_reads_what_wandb_writes(offline_run: Path) -> None:
    (run,) = find_runs(offline_run).runs
    assert run.name.startswith("wandb/offline-run-")
    reading = run.logs[0].open().poll()
    assert reading.parameters == {"lr": 0.1, "model.name": "tiny", "model.widths": "[8, 16]", "epochs": 3}
    assert values_of(reading.points, "loss") == LOSSES[:500]
    assert values_of(reading.points, "val.accuracy") == [(step, float(step)) for step in range(500)]
    assert {point.name for point in reading.points} == {"loss", "val.accuracy", "bad"}
    assert all(point.time is not None for point in reading.points)
    assert reading.has_ended


def test_wandb_log_joins_records_across_blocks(path: Path) -> None:
    path.write_bytes(wandb_file([{"_step": 1, "note": "x" * 3 * BLOCK_BYTES, "loss": 0.5}, *ROWS]))
    points = points_of(WandbLog(path), 1)
    assert points[0][:3] == ("loss", 1, 0.5)
    assert values_of(points[1:], "loss") == LOSSES
    assert points[1] == Point("loss", 0, 1.0, None, 1.8e9)


def test_wandb_log_follows_growth_in_any_pieces(tmp_path: Path) -> None:
    path, points = tmp_path / "run-a.wandb", []
    content = wandb_file(ROWS[:1000])
    assert len(content) > BLOCK_BYTES
    source = WandbLog(path)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), 1237):
            file.write(content[start : start + 1237])
            reading = source.poll()
            assert (reading.drop_from, reading.problem) == (None, None)
            points += reading.points
    assert values_of(points, "loss") == LOSSES[:1000]


def test_wandb_log_continues_after_damaged_block(path: Path) -> None:
    content = bytearray(wandb_file(ROWS))
    content[BLOCK_BYTES + 500] ^= 1
    path.write_bytes(content)
    source = WandbLog(path)
    reading = source.poll()
    assert reading.problem is not None and "damaged" in reading.problem
    found = values_of([*reading.points, *points_of(source)], "loss")
    assert 1000 < len(found) < 3000
    assert set(found) < set(LOSSES)
    assert found[-1] == LOSSES[-1] and source.poll().problem == reading.problem


def test_wandb_log_passes_over_large_record(path: Path) -> None:
    path.write_bytes(wandb_file(ROWS[:1], [field(9, b"x" * (2 * MAX_RECORD_BYTES))]))
    assert values_of(points_of(WandbLog(path)), "loss") == LOSSES[:1]


def test_wandb_log_starts_over_when_file_is_replaced(path: Path) -> None:
    path.write_bytes(wandb_file(ROWS[:3]))
    source = WandbLog(path)
    source.poll()
    path.write_bytes(wandb_file(ROWS[5:20]))
    reading = source.poll()
    assert (reading.drop_from, values_of(reading.points, "loss")) == (-math.inf, LOSSES[5:20])


def test_wandb_log_reads_changed_config(path: Path) -> None:
    records = [wandb_record(5, {"lr": 0.1, "_wandb": {"t": 1}}), wandb_record(5, {"lr": 0.2})]
    path.write_bytes(wandb_file(records=records))
    assert WandbLog(path).poll().parameters == {"lr": 0.2}


def test_wandb_log_reads_no_media(path: Path) -> None:
    path.write_bytes(wandb_file([{"_step": 0, "image": {"_type": "image-file", "width": 8}, "loss": 1}]))
    assert points_of(WandbLog(path)) == [Point("loss", 0, 1.0)]


def test_wandb_log_bounds_number_of_metrics(path: Path) -> None:
    path.write_bytes(wandb_file([{"_step": step, f"m{step}": 1} for step in range(MAX_METRICS + 5)]))
    reading = WandbLog(path).poll()
    assert len(reading.points) == MAX_METRICS
    assert reading.problem


def test_wandb_log_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "a.wandb"
    path.write_bytes(FILE_HEADER[:-1] + b"\x01" + bytes(100))
    reading = WandbLog(path).poll()
    assert (reading.points, reading.problem is None) == ([], False)
