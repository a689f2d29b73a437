"""The file of metrics that were found in output: one row for each step, bounded in rate, also on a full disk."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.jobs.command.metric_writer import BURST_BYTES, BYTES_PER_SECOND, MetricWriter
from engine.watch import row_files
from engine.watch.json_lines import JsonLines
from engine.watch.points import Point
from engine.watch.reading import list_folder
from support.foreign import points_of, values_of


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def writer(tmp_path: Path, clock: Clock) -> MetricWriter:
    return MetricWriter(tmp_path / "output.jsonl", now=clock, wall_time=lambda: 1.8e9)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "output.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_values_of_a_step_that_comes_again_stay(writer: MetricWriter, clock: Clock, tmp_path: Path) -> None:
    for step in (1, 2):
        writer.add([Point("loss", step, 1.0 / step), Point("acc", step, 0.5)])
    writer.poll()
    # ultralytics validates its best model once more at the end.
    writer.add([Point("acc", 2, 0.75)])
    writer.close()
    log = JsonLines(tmp_path / "output.jsonl")
    reading = log.poll()
    assert [(point.name, point.step, point.value) for point in reading.points] == [
        ("loss", 1, 1.0), ("acc", 1, 0.5), ("loss", 2, 0.5), ("acc", 2, 0.75),
    ]  # fmt: skip


def test_row_has_all_values_of_a_step(writer: MetricWriter, tmp_path: Path) -> None:
    writer.add([Point("loss", 3, 0.5, 1.0), Point("acc", 3, 0.25, 1.0)])
    writer.add([Point("lr", 3, 0.1)])
    writer.close()
    assert rows_of(tmp_path) == [
        {"step": 3, "epoch": 1.0, "loss": 0.5, "acc": 0.25, "lr": 0.1, "_timestamp": 1.8e9},
    ]
    assert row_files.find(list_folder(tmp_path))
    found = points_of(JsonLines(tmp_path / "output.jsonl"))
    assert found == [
        Point("loss", 3, 0.5, 1.0, 1.8e9),
        Point("acc", 3, 0.25, 1.0, 1.8e9),
        Point("lr", 3, 0.1, 1.0, 1.8e9),
    ]


def test_row_is_written_once_by_the_next_poll(writer: MetricWriter, tmp_path: Path) -> None:
    writer.add([Point("loss", 5, 1.0)])
    assert rows_of(tmp_path) == []
    writer.poll()
    writer.poll()
    assert [row["step"] for row in rows_of(tmp_path)] == [5]


def test_fast_output_is_written_at_a_bounded_rate(writer: MetricWriter, tmp_path: Path, clock: Clock) -> None:
    for step in range(40_000):
        writer.add([Point("loss", step, 1.0)])
        clock.seconds += 0.01
    writer.close()
    rows = rows_of(tmp_path)
    size = (tmp_path / "output.jsonl").stat().st_size
    assert [row["step"] for row in rows[:5000]] == list(range(5000))
    assert rows[-1]["step"] == 39_999
    assert size <= BURST_BYTES + 400 * BYTES_PER_SECOND + 1000


def test_file_cannot_be_written_for_a_while(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "metrics"
    writer = MetricWriter(folder / "output.jsonl", now=clock)
    writer.add([Point("loss", 1, 1.0)])
    clock.seconds += 1
    writer.poll()
    assert writer.problem == "output.jsonl cannot be written: No such file or directory"
    folder.mkdir()
    writer.poll()
    assert writer.problem is None
    assert [row["step"] for row in rows_of(folder)] == [1]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_no_part_of_a_row(writer: MetricWriter, tmp_path: Path, clock: Clock) -> None:
    writer.add([Point("loss", 1, 1.0), Point("loss", 2, 1.0)])
    clock.seconds += 1
    size = (tmp_path / "output.jsonl").stat().st_size
    with file_size_limit(size + 10):
        writer.poll()
    assert writer.problem is not None
    assert (tmp_path / "output.jsonl").stat().st_size == size
    writer.poll()
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_link_and_pipe_in_place_of_the_file_are_not_opened(writer: MetricWriter, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "output.jsonl")
    writer.add([Point("loss", 1, 1.0)])
    writer.close()
    (tmp_path / "output.jsonl").unlink()
    (tmp_path / "output.jsonl").symlink_to(tmp_path / "other")
    writer.add([Point("loss", 1, 1.0)])
    writer.close()
    assert writer.problem is not None and not (tmp_path / "other").exists()


def test_rows_are_not_read_back_and_follow_those_of_earlier_starts(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "output.jsonl"
    path.write_text('{"step": 1, "loss": 4.0}\n{"step": 2, "loss": 3.0}\n')
    writer = MetricWriter(path, now=clock)
    source = writer.open()
    assert values_of(source.poll().points, "loss") == [(1, 4.0), (2, 3.0)]
    for step, loss in ((2, 2.0), (3, 1.0)):
        writer.add([Point("loss", step, loss)])
    writer.poll()
    path.unlink()
    reading = source.poll()
    assert (reading.drop_from, values_of(reading.points, "loss")) == (2, [(2, 2.0), (3, 1.0)])
    assert not source.poll().points
