"""Steps that a resumed run repeats in files of rows void the earlier ones; other rows of one step do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.watch import restarts
from engine.watch.csv_file import CsvFile
from engine.watch.json_lines import JsonLines
from engine.watch.points import Point
from engine.watch.reading import Reading, Source
from support.foreign import values_of


def kept_values(source: Source, name: str) -> list[tuple[int, float]]:
    """Poll a source once more than it has news, and return the values of a metric that are not void."""
    points: list[Point] = []
    for reading in _readings(source):
        if reading.drop_from is not None:
            points = [point for point in points if point.step < reading.drop_from]
        points += reading.points
    return values_of(points, name)


def _readings(source: Source) -> list[Reading]:
    readings = [source.poll()]
    while readings[-1].points:
        readings.append(source.poll())
    return readings


def write_rows(path: Path, steps: list[int]) -> Path:
    """Write a row for each step, whose loss is the number of the row."""
    rows = "".join(f"{step},{number}\n" for number, step in enumerate(steps))
    path.write_text(f"epoch,loss\n{rows}")
    return path


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([0, 1, 2, 3, 2, 3, 4], [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]),
        ([0, 1, 2, 2, 3], [(0, 0), (1, 1), (2, 3), (3, 4)]),
        ([0, 1, 2, 0, 1], [(0, 3), (1, 4)]),
        ([0, 10, 20, 5, 15], [(0, 0), (5, 3), (15, 4)]),
    ],
)
def test_repeated_steps_void_earlier_ones(tmp_path: Path, steps: list[int], kept: list[tuple[int, float]]) -> None:
    assert kept_values(CsvFile(write_rows(tmp_path / "a.csv", steps)), "loss") == kept


def test_repeated_steps_void_points_of_earlier_poll(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", [0, 1, 2, 3])
    source = CsvFile(path)
    assert len(source.poll().points) == 4
    with path.open("a") as file:
        file.write("2,0.5\n3,0.25\n1,0.125\n")
    reading = source.poll()
    assert (reading.drop_from, reading.points) == (1, [Point("loss", 1, 0.125, 1.0)])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "epoch,loss\n0,1\n1,2\nepoch,loss,top5\n1,3,4\n2,5,6\n",
            {"loss": [(0, 1), (1, 3), (2, 5)], "top5": [(1, 4), (2, 6)]},
        ),
        (
            "step,loss,val_loss\n4,1,\n9,2,\n9,,3\n14,4,\n19,,5\n",
            {"loss": [(4, 1), (9, 2), (14, 4)], "val_loss": [(9, 3), (19, 5)]},
        ),
        ("epoch,loss\n0,0\n0,1\n0,2\n1,3\n1,4\n1,5\n", {"loss": [(row // 3, row) for row in range(6)]}),
    ],
    ids=["a repeated heading with other columns", "sparse rows of one step", "rows per batch with an epoch only"],
)
def test_rows_void_only_those_of_an_earlier_start(
    tmp_path: Path, text: str, kept: dict[str, list[tuple[int, float]]]
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    assert {name: kept_values(CsvFile(path), name) for name in kept} == kept


def test_validation_rows_numbered_by_epochs_void_no_iterations(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for epoch in (1, 2, 3):
        rows += [{"loss": 1.0, "time": 0.1, "step": 100 * epoch + number} for number in (0, 50)]
        rows.append({"mAP": 0.5, "time": 0.2, "step": epoch})
    path = tmp_path / "scalars.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [step for step, _ in kept_values(JsonLines(path), "loss")] == [100, 150, 200, 250, 300, 350]
    assert [step for step, _ in kept_values(JsonLines(path), "mAP")] == [1, 2, 3]


def test_number_of_restarts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 2)
    path = write_rows(tmp_path / "a.csv", [0, 1, 1, 1, 1, 2])
    assert kept_values(CsvFile(path), "loss") == [(0, 0), (1, 3), (1, 4), (2, 5)]


def test_resumed_run_with_two_rows_per_step_keeps_both(tmp_path: Path) -> None:
    rows = [{"step": step, name: 1.0} for step in (*range(10), *range(5, 12)) for name in ("train_loss", "val_loss")]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("train_loss", "val_loss"):
        assert [step for step, _ in kept_values(JsonLines(path), name)] == list(range(12))
