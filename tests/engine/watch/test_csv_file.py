"""CSV files of Lightning, Keras, ultralytics and timm: growing, rewritten, torn, and those that are no logs."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from engine.watch import row_files
from engine.watch.csv_file import CsvFile
from engine.watch.folders import SearchLimits, find_runs
from engine.watch.growing_file import MAX_LINE_BYTES
from engine.watch.points import Point
from engine.watch.reading import ColumnChoice, list_folder
from support.foreign import points_of, values_of

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.csv"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("3,,nan", [("a", 3, math.nan)]),
        ("3,inf,-1e3", [("b", 3, math.inf), ("a", 3, -1000.0)]),
        ("3,text,1", [("a", 3, 1.0)]),
        ("3", []),
        ('3,"1,5",2', [("a", 3, 2.0)]),
        ("1e300,1,2", [("b", 0, 1.0), ("a", 0, 2.0)]),
        ("3,1,2,4,5", [("b", 3, 1.0), ("a", 3, 2.0)]),
    ],
)
def test_csv_file_reads_odd_row(path: Path, row: str, expected: list[tuple[str, int, float]]) -> None:
    path.write_text(f"step,b,a\n{row}\n")
    points = points_of(CsvFile(path))
    assert [point[:2] for point in points] == [point[:2] for point in expected]
    assert [point.value for point in points] == pytest.approx([point[2] for point in expected], nan_ok=True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("timestamp,loss\n1.8e9,1\n1.9e9,2\n", [Point("loss", 0, 1, None, 1.8e9), Point("loss", 1, 2, None, 1.9e9)]),
        (
            "epoch,loss\n" + "".join(f"{row / 4},{row}\n" for row in range(10)),
            [Point("loss", row, row, row / 4) for row in range(10)],
        ),
        ("epoch,split,loss\n1,train,1\n1,val,2\n", [Point("loss", 1, 1, 1), Point("val/loss", 1, 2, 1)]),
    ],
    ids=["times and no step", "fractional epochs", "part of the data"],
)
def test_csv_file_knows_columns_by_their_names(tmp_path: Path, content: str, expected: list[Point]) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert points_of(CsvFile(tmp_path / "a.csv")) == expected


def test_csv_file_waits_for_end_of_torn_row(path: Path) -> None:
    source = CsvFile(path)
    path.write_text("step,loss\n1,0.5\n2,0.2")
    assert values_of(source.poll().points, "loss") == [(1, 0.5)]
    with path.open("a") as file:
        file.write("5\n")
    assert values_of(source.poll().points, "loss") == [(2, 0.25)]


def test_csv_file_reads_last_row_without_line_break_of_settled_file(path: Path) -> None:
    path.write_text("step,loss\n1,0.5")
    os.utime(path, (time.time() - 60,) * 2)
    assert values_of(points_of(CsvFile(path)), "loss") == [(1, 0.5)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_csv_file_continues_when_same_rows_are_rewritten(path: Path, is_replaced: bool) -> None:
    rows = [f"{step},{step / 4}" for step in range(2000)]
    path.write_text("\n".join(["step,loss", *rows[:1000], ""]))
    source = CsvFile(path)
    assert len(source.poll().points) == 1000
    path.write_text("")
    assert source.poll().drop_from is None
    if is_replaced:
        path.unlink()
    path.write_text("\n".join(["step,loss", *rows, ""]))
    reading = source.poll()
    assert (reading.drop_from, len(reading.points)) == (None, 1000)


def test_csv_file_starts_over_when_column_is_added(path: Path) -> None:
    path.write_text("step,loss\n1,0.5\n")
    source = CsvFile(path)
    source.poll()
    path.write_text("step,loss,accuracy\n1,0.5,\n2,,0.75\n")
    reading = source.poll()
    assert reading.drop_from == -math.inf
    assert reading.points == [Point("loss", 1, 0.5), Point("accuracy", 2, 0.75)]


def test_csv_file_starts_over_when_file_stays_short(path: Path) -> None:
    path.write_text("step,loss\n" + "1,0.5\n" * 100)
    source = CsvFile(path)
    source.poll()
    path.write_text("step,loss\n7,0.25\n")
    readings = [source.poll() for _ in range(3)]
    assert [reading.drop_from for reading in readings] == [None, -math.inf, None]
    assert readings[1].points == [Point("loss", 7, 0.25)]


def test_csv_file_skips_endless_line(path: Path) -> None:
    path.write_text("step,loss\n1,0.5\n" + "9" * (5 * MAX_LINE_BYTES) + "\n2,0.25\n")
    assert values_of(points_of(CsvFile(path), 1000), "loss") == [(1, 0.5), (2, 0.25)]


def test_csv_file_reports_pipe_and_link(tmp_path: Path) -> None:
    pipe, link = tmp_path / "a.csv", tmp_path / "b.csv"
    os.mkfifo(pipe)
    link.symlink_to(RECORDINGS / "keras/history.csv")
    for path in (pipe, link, tmp_path / "missing.csv"):
        reading = CsvFile(path).poll()
        assert (reading.points, reading.problem is None) == ([], False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("epoch,loss\n", True),
        ("Step;loss\n", True),
        ("\ufeffepoch,loss\n", True),
        ("image,label\na.png,3\n", False),
        ("epoch\n", False),
        ("train_loss,val_loss\n1,2\n", True),
        ("model,val_acc\nresnet,0.9\n", False),
    ],
)
def test_table_is_a_log_by_its_heading(tmp_path: Path, content: str, expected: bool) -> None:
    (tmp_path / "labels.csv").write_text(content)
    assert bool(row_files.find(list_folder(tmp_path))) == expected


@pytest.mark.parametrize(
    ("content", "expected"), [("q,r\n", True), ("q,r\n1,2\n", True), ("model,acc\nvit,0.5\n", False)]
)
def test_table_of_known_name_is_a_log_unless_it_has_texts(tmp_path: Path, content: str, expected: bool) -> None:
    (tmp_path / "results.csv").write_text(content)
    assert bool(find_runs(tmp_path).runs) is expected


def test_columns_that_the_user_names_are_the_axis_and_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("hour,rank,temp\n0.5,1,20\n1.5,1,30\n")
    assert not find_runs(tmp_path).runs
    choice = ColumnChoice("hour", "RANK")
    [run] = find_runs(tmp_path, SearchLimits(choice=choice)).runs
    points = points_of(run.logs[0].open())
    assert points == [Point("rank", 0, 1.0, 0.5), Point("rank", 1, 1.0, 1.5)]
    unknown = CsvFile(tmp_path / "a.csv", choice=ColumnChoice("day"))
    assert unknown.poll().problem == "a.csv has no column day: its rows are counted"


def test_table_without_metrics_says_so(path: Path) -> None:
    path.write_text("name,note\na,b\n")
    assert CsvFile(path).poll().problem == "no line of a.csv is read as metrics"
