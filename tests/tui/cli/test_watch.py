"""`gputrain watch` lists the runs that other programs have recorded."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

from support.messages import says
from support.runs.trained_run import call

RECORDED = Path(__file__).parents[2] / "recordings" / "foreign"


def watched(*arguments: object) -> list[dict[str, object]]:
    result = call("watch", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return list(json.loads(result.stdout)["runs"])


def metrics(run: dict[str, object]) -> dict[str, tuple[int, int, float]]:
    found = run["metrics"]
    assert isinstance(found, list)
    return {row["name"]: (row["count"], row["last_step"], row["last_value"]) for row in found}


def test_watch_lists_each_recorded_run_with_its_format() -> None:
    runs = {str(run["name"]): run["formats"] for run in watched(RECORDED)}
    assert (
        runs.items()
        >= {
            "lightning/csv": ["csv"],
            "lightning/tb": ["tensorboard"],
            "keras": ["csv"],
            "timm": ["csv"],
            "trainer": ["trainer-state"],
        }.items()
    )
    lines = call("watch", RECORDED).stdout.splitlines()
    assert lines[0].split()[:4] == ["name", "format", "step", "changed"]
    assert sorted(line.split()[0] for line in lines[1:]) == sorted(runs)


def test_watch_as_json_has_count_last_step_and_last_value_of_the_file() -> None:
    [run] = watched(RECORDED / "keras")
    rows = list(csv.DictReader((RECORDED / "keras" / "history.csv").open(), delimiter=";"))
    last = rows[-1]
    assert metrics(run)["loss"] == (len(rows), int(last["epoch"]), float(last["loss"]))


def test_watch_of_lightning_finds_the_parameters() -> None:
    [run] = watched(RECORDED / "lightning" / "csv")
    assert run["parameters"]


def test_watch_lists_run_below_two_paths_once_and_the_latest_first(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        log = tmp_path / name / "metrics.csv"
        log.write_text("step,loss\n1,0.5\n")
        os.utime(log, (1e9 + number, 1e9 + number))
    assert [run["name"] for run in watched(tmp_path)] == ["new", "old"]
    assert [run["name"] for run in watched(tmp_path, tmp_path, "-n", 1)] == ["new"]


def test_watch_escapes_names_and_opens_no_fifo(tmp_path: Path) -> None:
    run = tmp_path / "a\x1b[31m"
    run.mkdir()
    (run / "metrics.csv").write_text("step,loss\n1,0.5\n")
    os.mkfifo(tmp_path / "metrics.csv")
    result = call("watch", tmp_path)
    assert result.exit_code == 0 and "\x1b" not in result.stdout and r"a\x1b[31m" in result.stdout


def test_watch_writes_nothing_below_the_path(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n")
    watched(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_watch_of_missing_and_empty_path_says_so(tmp_path: Path) -> None:
    missing = call("watch", tmp_path / "none")
    assert missing.exit_code == 2 and says(missing.stderr, "not-found", "none")
    empty = call("watch", tmp_path)
    assert (empty.exit_code, empty.stdout) == (0, "") and "gputrain watch --help" in empty.stderr
