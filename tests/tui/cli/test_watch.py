"""`gputrain watch` lists the runs that other programs have recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer

from support.messages import says
from support.runs.trained_run import call


def watched(*arguments: object) -> list[dict[str, object]]:
    result = call("watch", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return list(json.loads(result.stdout)["runs"])


def test_watch_lists_run_below_two_paths_once_and_the_latest_first(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n1,0.5\n")
    os.utime(tmp_path / "old" / "metrics.csv", (1e9, 1e9))
    assert [(run["name"], run["state"]) for run in watched(tmp_path)] == [("new", "growing"), ("old", "quiet")]
    assert [run["name"] for run in watched(tmp_path, tmp_path, "-n", 1)] == ["new"]


def test_watch_of_missing_and_empty_path_says_so(tmp_path: Path) -> None:
    missing = call("watch", tmp_path / "none")
    assert missing.exit_code == 2 and says(missing.stderr, "not-found", "none")
    empty = call("watch", tmp_path)
    assert (empty.exit_code, empty.stdout) == (0, "") and "gputrain watch --help" in empty.stderr


def test_watch_of_printed_lines_names_the_command_that_reads_them(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("epoch 1 loss 0.5\n")
    assert call("watch", log).stderr.endswith(f"What is found in printed lines: gputrain run --try-parse {log}\n")


def test_watch_of_missing_process_is_refused() -> None:
    for pid in ("4194304", "9" * 5000):
        result = call("watch", pid)
        assert result.exit_code == 2 and says(result.stderr, "not-found")
    result = call("watch", os.getpid(), os.getpid())
    assert result.exit_code == 2 and says(result.stderr, "too-many")


def make_own_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("events.jsonl", "owner.json", "lock"):
        (folder / name).touch()
    return folder


def test_watch_says_how_to_list_the_runs_of_gputrain(tmp_path: Path) -> None:
    own = make_own_run(tmp_path / "runs" / "a")
    alone = call("watch", tmp_path)
    assert alone.exit_code == 0 and says(alone.stderr, "recorded-elsewhere", f"gputrain attach {own}")
    make_own_run(tmp_path / "runs" / "b")
    (tmp_path / "metrics.csv").write_text("step,loss\n1,0.5\n")
    both = call("watch", tmp_path, "--json")
    assert says(both.stderr, "recorded-elsewhere", f"gputrain runs --runs-dir {tmp_path / 'runs'}")
    assert [run["name"] for run in json.loads(both.stdout)["runs"]] == [tmp_path.name]


def test_watch_on_a_terminal_opens_the_screen_of_a_path_or_of_a_run_of_gputrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def open_screen(*, run: str = "", watched: object = None, **options: object) -> None:
        opened.append(run or watched)
        raise typer.Exit

    monkeypatch.setattr("tui.cli.watch.should_open_screen", lambda *, headless: not headless)
    monkeypatch.setattr("tui.cli.open_tui.open_screen", open_screen)
    own = make_own_run(tmp_path / "runs" / "a")
    for arguments in ((tmp_path,), (tmp_path, "-n", 1), (own,)):
        call("watch", *arguments)
    assert opened == [[tmp_path], str(own)]


def test_watch_prints_each_point_of_one_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\n1,0.5,nan\n2,1,0.25\n")
    result = call("watch", tmp_path, "--curves")
    assert result.stdout.splitlines() == ["metric,step,epoch,time,value", "loss,1,0.5,,nan", "loss,2,1.0,,0.25"]
    printed = json.loads(call("watch", tmp_path, "--curves", "--json").stdout)
    assert [point["value"] for point in printed["points"]] == [None, 0.25]


def test_watch_prints_the_points_of_no_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n1,1\n")
    result = call("watch", tmp_path, "--curves")
    assert result.exit_code == 2 and says(result.stderr, "ambiguous-name")


def test_watch_refuses_a_path_that_it_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,0.5\n")
    path.chmod(0)
    # For root, who may read everything.
    monkeypatch.setattr(os, "access", lambda name, mode: mode != os.R_OK or bool(Path(name).stat().st_mode & 0o400))
    refused = call("watch", path, "--json")
    assert refused.exit_code == 1 and says(refused.stderr, "not-readable", path)
