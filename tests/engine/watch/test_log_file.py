"""The log of a foreign run is a text file beside its metrics."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.watch.folders import find_runs
from engine.watch.log_file import find_log_file


def make_run(folder: Path, *files: str) -> Path:
    for name in ("metrics.csv", *files):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("step,loss\n1,0.5\n")
    return folder


@pytest.mark.parametrize(
    "files, found",
    [
        (["log.txt", "other.log"], "log.txt"),
        (["train.py.log"], "train.py.log"),
        (["files/output.log"], "files/output.log"),
        (["notes.txt", "inner/train.log"], None),
    ],
)
def test_find_log_file_prefers_usual_names(tmp_path: Path, files: list[str], found: str | None) -> None:
    [run] = (run for run in find_runs(make_run(tmp_path, *files)).runs if run.folder == tmp_path)
    assert find_log_file(run) == (None if found is None else tmp_path / found)


def test_find_log_file_takes_the_log_that_was_written_last(tmp_path: Path) -> None:
    [run] = find_runs(make_run(tmp_path, "a.log", "b.log", "c.log")).runs
    for name, seconds in {"a.log": 1, "b.log": 3, "c.log": 2}.items():
        os.utime(tmp_path / name, (seconds, seconds))
    assert find_log_file(run) == tmp_path / "b.log"


def test_find_log_file_follows_no_link_and_opens_no_pipe(tmp_path: Path) -> None:
    [run] = find_runs(make_run(tmp_path)).runs
    (tmp_path / "log.txt").symlink_to("/etc/passwd")
    (tmp_path / "files").symlink_to("/var/log")
    os.mkfifo(tmp_path / "train.log")
    assert find_log_file(run) is None


def test_find_log_file_takes_no_file_of_metrics(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text('{"step": 1, "loss": 0.5}\n')
    for run in find_runs(tmp_path).runs:
        assert find_log_file(run) is None
