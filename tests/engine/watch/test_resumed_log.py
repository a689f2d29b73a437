"""The logs of several starts of a run are one log, in which the steps that a start repeats void the earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.watch.csv_file import CsvFile
from engine.watch.points import Point
from engine.watch.resumed_log import ResumedSource
from support.foreign import values_of


def source_of(folder: Path, *texts: str) -> ResumedSource:
    """Return the source of one CSV file for each start."""
    paths = [folder / f"{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return ResumedSource([lambda path=path: CsvFile(path) for path in paths])  # type: ignore[misc]


def read(source: ResumedSource, polls: int = 5, max_bytes: int = 1 << 19) -> list[Point]:
    points: list[Point] = []
    for _ in range(polls):
        reading = source.poll(max_bytes)
        if reading.drop_from is not None:
            points = [point for point in points if point.step < reading.drop_from]
        points += reading.points
    return points


@pytest.mark.parametrize(
    ("starts", "losses"),
    [
        (
            ["step,loss\n1,9\n2,8\n", "step,loss\n3,7\n4,6\n", "step,loss\n5,5\n"],
            [(1, 9), (2, 8), (3, 7), (4, 6), (5, 5)],
        ),
        (["step,loss\n1,9\n", "step,loss\n1,5\n"], [(1, 5)]),
        (["step,hp,loss\n0,1,\n1,,9\n2,,8\n", "step,hp,loss\n0,1,\n3,,7\n"], [(1, 9), (2, 8), (3, 7)]),
    ],
    ids=["goes on", "from the beginning", "with a metric that each start writes once"],
)
def test_start_continues_the_curve_from_its_first_step(
    tmp_path: Path, starts: list[str], losses: list[tuple[int, float]]
) -> None:
    assert values_of(read(source_of(tmp_path, *starts)), "loss") == losses


def test_repeated_steps_void_those_of_earlier_starts(tmp_path: Path) -> None:
    source = source_of(tmp_path, "step,loss,val\n1,9,9\n2,8,8\n3,7,7\n", "step,loss\n2,6\n3,5\n")
    points = read(source)
    assert values_of(points, "loss") == [(1, 9), (2, 6), (3, 5)]
    assert values_of(points, "val") == [(1, 9)]


def test_rows_that_are_appended_to_the_latest_start_follow(tmp_path: Path) -> None:
    source = source_of(tmp_path, "step,loss\n1,9\n", "step,loss\n2,8\n")
    points = read(source)
    with (tmp_path / "1.csv").open("a") as file:
        file.write("3,7\n")
    assert values_of(points + read(source), "loss") == [(1, 9), (2, 8), (3, 7)]


def test_file_that_is_replaced_is_read_again_with_those_before(tmp_path: Path) -> None:
    source = source_of(tmp_path, "step,loss\n1,9\n2,8\n", "step,loss\n2,7\n3,6\n")
    read(source)
    (tmp_path / "1.csv").unlink()
    (tmp_path / "1.csv").write_text("step,loss\n3,5\n4,4\n5,3\n")
    assert values_of(read(source), "loss") == [(1, 9), (2, 8), (3, 5), (4, 4), (5, 3)]
