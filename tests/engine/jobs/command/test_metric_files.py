"""The curves of a command: `$GPUTRAIN_METRICS`, files below the working folder, and what was found in the output."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from engine.jobs.command import metric_files
from engine.jobs.command.metric_files import (
    FILES_FILE,
    METRICS_FOLDER,
    OUTPUT_FILE,
    OWN_FILE,
    START_SLACK_SECONDS,
    CommandMetrics,
    MetricFiles,
    command_metrics,
    make_metrics_folder,
    metric_key,
)
from engine.watch.folders import RunFollower, SearchLimits
from engine.watch.points import Point
from support.foreign import event, event_file, scalar

CSV = "step,loss\n1,3\n2,2\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/first"
    run.mkdir(parents=True)
    make_metrics_folder(run)
    return run


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def searches_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(metric_files, "FIRST_SHARE", 1e9)


def write(path: Path, text: str = CSV) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def files_of(metrics: CommandMetrics) -> list[Path]:
    return [path for log in metrics.logs for path in log.files]


def read(metrics: CommandMetrics) -> list[list[Point]]:
    """Return the points of each log that are not void."""
    follower, points = RunFollower(metrics), [list[Point]() for _ in metrics.logs]
    for _ in range(20):
        for found, reading in zip(points, follower.poll(), strict=True):
            if reading.drop_from is not None:
                found[:] = [point for point in found if point.step < reading.drop_from]
            found += reading.points
    return points


def names_of(metrics: CommandMetrics) -> list[list[str]]:
    return [sorted({point.name for point in points}) for points in read(metrics)]


# Files below the working folder


def test_file_that_was_there_before_is_found_when_it_grows(run: Path, cwd: Path) -> None:
    path = write(cwd / "metrics.csv")
    time.sleep(0.1)
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    assert files.poll(10).logs == ()
    with path.open("a") as file:
        file.write("3,1\n")
    assert files_of(files.poll(10)) == [path]


def test_paths_are_searched_in_place_of_the_working_folder(run: Path, cwd: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    files = MetricFiles(run, cwd=cwd, started_at=time.time(), paths=[elsewhere, cwd / "one.csv"])
    write(cwd / "other/metrics.csv")
    wanted = [write(elsewhere / "metrics.csv"), write(cwd / "one.csv")]
    assert files_of(files.poll(10)) == wanted


@pytest.mark.parametrize(
    "place", [".hidden", ".git/logs", "venv/lib/site-packages", "data", "datasets/x", "node_modules", "a/b/c/d/e/f/g"]
)
def test_places_without_logs_are_not_searched(run: Path, cwd: Path, place: str) -> None:
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    write(cwd / place / "metrics.csv")
    assert files.poll(10).logs == ()


def test_own_run_folder_and_other_runs_below_the_working_folder_are_not_searched(cwd: Path) -> None:
    run, other = cwd / "runs/own", cwd / "runs/other"
    for folder in (run, other):
        folder.mkdir(parents=True)
        make_metrics_folder(folder)
        write(folder / METRICS_FOLDER / OUTPUT_FILE, '{"step": 1, "loss": 1}\n')
    for name in ("events.jsonl", "owner.json"):
        (other / name).touch()
    files = MetricFiles(run, cwd=cwd, started_at=time.time() - 1)
    assert files_of(files.poll(10)) == [run / METRICS_FOLDER / OUTPUT_FILE]


def test_links_and_pipes_are_not_followed(run: Path, cwd: Path, tmp_path: Path) -> None:
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    outside = write(tmp_path / "outside/metrics.csv")
    (cwd / "link").symlink_to(outside.parent)
    (cwd / "metrics.csv").symlink_to(outside)
    os.mkfifo(cwd / "log.jsonl")
    assert files.poll(10).logs == ()


def test_search_of_large_folder_is_spread_over_polls(run: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The search at the start ends after a folder, as that of each poll does.
    monkeypatch.setattr(metric_files, "START_SEARCH_SECONDS", -1.0)
    for number in range(300):
        (cwd / f"many/{number}").mkdir(parents=True)
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    # The last one in the order of names, in which folders are searched.
    created = write(cwd / "many/99/metrics.csv")
    num_polls = 1
    while not files.poll(max_seconds=-1.0).logs and num_polls < 1000:
        num_polls += 1
    assert num_polls >= 300
    assert files_of(files.metrics) == [created]


def test_runs_of_a_database_that_were_there_before_are_left_out(run: Path, cwd: Path) -> None:
    path = cwd / "project.db"
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        database.execute("INSERT INTO metrics VALUES (1, '2026-01-01T00:00:00', 'old', 1, '{\"loss\": 1}')")
    files = MetricFiles(run, cwd=cwd, started_at=time.time() - 1)
    assert files.poll(10).logs == ()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO metrics VALUES (2, '2026-01-01T00:00:00', 'new', 1, '{\"loss\": 1}')")
    database.close()
    assert [log.run for log in files.poll(10).logs] == ["project/new"]


def test_file_that_a_process_of_another_command_has_open_is_left_out(run: Path, cwd: Path) -> None:
    script = f"exec 3>>metrics.csv; printf '{CSV}' >&3; echo; cat"
    other = subprocess.Popen(["sh", "-c", script], cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == b"\n"
    members = {os.getpid()}
    files = MetricFiles(run, cwd=cwd, started_at=time.time() - 1, members=lambda: members)
    assert files.poll(10).logs == ()
    members.add(other.pid)
    assert files_of(files.poll(10)) == [cwd / "metrics.csv"]
    other.communicate()


# The record of where they are


def test_record_finds_the_files_without_a_search(run: Path, cwd: Path) -> None:
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    created = write(cwd / "logs/metrics.csv")
    files.poll(10)
    write(cwd / "later/metrics.csv")
    assert files_of(command_metrics(run)) == [created]


def test_last_search_finds_what_was_written_at_the_end(run: Path, cwd: Path) -> None:
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    files.poll(10)
    created = write(cwd / "metrics.csv")
    assert files_of(files.close()) == files_of(command_metrics(run)) == [created]


def test_file_that_another_run_has_written_since_the_end_is_left_out(run: Path, cwd: Path) -> None:
    path = write(cwd / "metrics.csv")
    MetricFiles(run, cwd=cwd, started_at=time.time() - 1).close()
    assert files_of(command_metrics(run)) == [path]
    time.sleep(0.1)
    write(path, "step,loss\n1,9\n")
    assert command_metrics(run).logs == ()


def test_run_of_another_user_leads_to_no_file_outside(run: Path, cwd: Path) -> None:
    write(cwd / "metrics.csv")
    write(run / METRICS_FOLDER / OWN_FILE, '{"step": 1, "loss": 1}\n')
    MetricFiles(run, cwd=cwd, started_at=time.time() - 1).close()
    assert files_of(command_metrics(run, is_own=False)) == [run / METRICS_FOLDER / OWN_FILE]


@pytest.mark.parametrize("text", ["", "{}", "[", '{"format": 9}', "x" * 2_000_000])
def test_damaged_record_is_passed_over(run: Path, text: str) -> None:
    write(run / METRICS_FOLDER / FILES_FILE, text)
    assert command_metrics(run).logs == ()


# Several starts of the command


def test_file_of_each_start_continues_the_curve_of_the_one_before(run: Path, cwd: Path) -> None:
    first = MetricFiles(run, cwd=cwd, started_at=time.time())
    write(cwd / "version_0/metrics.csv", "step,loss,acc\n1,9,0\n2,8,0\n3,7,0\n")
    first.close()
    second = MetricFiles(run, cwd=cwd, started_at=time.time())
    assert names_of(second.metrics) == [["acc", "loss"]]
    write(cwd / "version_1/metrics.csv", "step,loss\n3,6\n4,5\n")
    for metrics in (second.poll(10), second.close(), command_metrics(run)):
        [points] = read(metrics)
        losses = [(point.step, point.value) for point in points if point.name == "loss"]
        assert losses == [(1, 9), (2, 8), (3, 6), (4, 5)]


def test_file_to_which_each_start_appends_is_one_log(run: Path, cwd: Path) -> None:
    path = write(cwd / "metrics.csv")
    MetricFiles(run, cwd=cwd, started_at=time.time() - 1).close()
    with path.open("a") as file:
        file.write("3,1\n")
    again = MetricFiles(run, cwd=cwd, started_at=time.time() - 1)
    assert files_of(again.poll(10)) == [path]
    assert [(point.step, point.value) for point in read(again.metrics)[0]] == [(1, 3), (2, 2), (3, 1)]


def test_rows_of_an_earlier_run_are_not_of_a_later_one(tmp_path: Path, run: Path, cwd: Path) -> None:
    path, later = write(cwd / "metrics.csv", "step,loss\n1,9\n2,8\n"), tmp_path / "later"
    (later / METRICS_FOLDER).mkdir(parents=True)
    first = MetricFiles(run, cwd=cwd, started_at=time.time() - 1)
    first.close()
    # The rows may be there before the first poll.
    files = MetricFiles(later, cwd=cwd, started_at=time.time() + START_SLACK_SECONDS)
    time.sleep(2 * START_SLACK_SECONDS)
    with path.open("a") as file:
        file.write("2,7\n3,6\n")
    for metrics in (files.close(), command_metrics(later)):
        assert [(point.step, point.value) for point in read(metrics)[0]] == [(2, 7), (3, 6)]
    assert [point.value for point in read(command_metrics(run))[0]] == [9, 8]


def test_file_that_another_run_has_written_between_two_starts_is_left_out(run: Path, cwd: Path) -> None:
    path = write(cwd / "metrics.csv")
    MetricFiles(run, cwd=cwd, started_at=time.time() - 1).close()
    time.sleep(0.1)
    write(path, "step,loss\n1,9\n")
    assert MetricFiles(run, cwd=cwd, started_at=time.time() + 60).metrics.logs == ()


# One metric of several logs


def test_metric_of_several_logs_counts_once(run: Path, cwd: Path) -> None:
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    write(run / METRICS_FOLDER / OUTPUT_FILE, '{"step": 9, "loss": 9, "acc": 9, "Train/LR": 9, "only": 9}\n')
    write(cwd / "metrics.csv", "step,train/loss,acc,own\n1,3,1,1\n")
    write(run / METRICS_FOLDER / OWN_FILE, '{"step": 1, "acc": 7, "lr": 7}\n')
    assert names_of(files.poll(10)) == [["acc", "lr"], ["own", "train/loss"], ["only"]]


@pytest.mark.parametrize(
    ("name", "other"), [("loss", "train/loss"), ("Loss", "train_loss"), ("val/acc@1", "val_acc@1"), ("LR", "lr")]
)
def test_names_of_the_same_metric_have_one_key(name: str, other: str) -> None:
    assert metric_key(name) == metric_key(other)
    assert metric_key(name) != metric_key(f"val_{name}")


def test_parameters_are_arguments_and_files_beside_the_metrics(run: Path, cwd: Path) -> None:
    write(cwd / "out/metrics.csv")
    write(cwd / "out/args.yaml", "lr: 0.1\ndepth: 3\n")
    write(run / "config.yaml", "run:\n  name: x\n")
    files = MetricFiles(run, cwd=cwd, started_at=time.time() - 1, arguments={"lr": 0.5, "b": 32})
    assert files.poll(10).read_parameters() == {"lr": 0.5, "depth": 3, "b": 32}


# $GPUTRAIN_METRICS


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_own_file_of_another_kind_is_not_opened(run: Path, tmp_path: Path, kind: str) -> None:
    path = run / METRICS_FOLDER / OWN_FILE
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(write(tmp_path / "secret.jsonl", json.dumps({"step": 1, "loss": 1}) + "\n"))
    assert [points for points in read(command_metrics(run)) if points] == []


def test_partial_search_that_found_no_file_says_so(run: Path, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_files, "SEARCH_LIMITS", SearchLimits(folders=2))
    for name in "ab":
        (cwd / name).mkdir()
    files = MetricFiles(run, cwd=cwd, started_at=time.time())
    files.poll(10)
    assert files.may_lack_files
    write(cwd / "metrics.csv")
    files.poll(10)
    assert not files.may_lack_files


def ended_run(tmp_path: Path, work: Path) -> Path:
    """Return the folder of a run whose command has ended now."""
    run = tmp_path / "run"
    (run / "metrics").mkdir(parents=True)
    MetricFiles(run, cwd=work, started_at=0.0).close()
    wait_until_clock_moves()
    return run


def wait_until_clock_moves() -> None:
    time.sleep(2 * START_SLACK_SECONDS)


def values_of(run: Path, work: Path) -> list[tuple[str, int]]:
    follower = RunFollower(command_metrics(run))
    return [(point.name, point.step) for reading in follower.poll() for point in reading.points]


def test_rows_that_another_run_appends_later_are_not_of_an_ended_run(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "metrics.csv").write_text("step,loss\n1,1\n2,1\n")
    run = ended_run(tmp_path, work)
    with (work / "metrics.csv").open("a") as file:
        file.write("3,5\n")
    assert values_of(run, work) == [("loss", 1), ("loss", 2)]
    (work / "metrics.csv").write_text("step,loss\n1,9\n2,9\n3,9\n")
    assert values_of(run, work) == []


def test_event_files_that_another_run_writes_later_are_not_of_an_ended_run(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "tb").mkdir(parents=True)
    (work / "tb" / "events.out.tfevents.1.a").write_bytes(event_file(event(1, scalar("loss", 1))))
    run = ended_run(tmp_path, work)
    (work / "tb" / "events.out.tfevents.2.a").write_bytes(event_file(event(7, scalar("loss", 5))))
    assert values_of(run, work) == [("loss", 1)]
