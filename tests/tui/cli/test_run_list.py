"""`gputrain runs` and its subcommands: what they list, change, ask and refuse."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.config.differences import flat_values
from engine.config.schema import UNSTORED_KEYS
from engine.config.yaml_io import parse_yaml
from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.runs.labels import read_labels
from engine.runs.manage import list_trash, move_folder
from support.gputrain_command import GPUTRAIN
from support.messages import says
from support.runs.factories import append_events, make_ended_runs, make_run_folder
from tui.cli import run_list
from tui.cli.main import app


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_ended_runs(tmp_path / "runs", 8)
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def runs(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, ["runs", *arguments], input=answer)


def listed(*arguments: str) -> list[str]:
    result = runs(*arguments)
    assert result.exit_code == 0, result.output
    return [line.split()[0] for line in result.stdout.splitlines()[1:]]


def test_runs_lists_matching_runs_in_order(root: Path) -> None:
    assert listed() == [f"run-{number}" for number in reversed(range(8))]
    assert listed("failed") == ["run-7", "run-0"]
    assert listed("optim.name=adamw", "-failed") == ["run-5", "run-3", "run-1"]
    assert listed("-n", "2", "model=cnn") == ["run-6", "run-3"]
    assert listed("--sort", "lr", "-n", "2") == ["run-7", "run-3"]
    assert listed("--sort=-lr", "-n", "1") == listed("--sort", "lr", "--reverse", "-n", "1") == ["run-4"]
    assert listed("--reverse", "-n", "1") == ["run-0"]
    assert listed("--sort", "-name", "-model=cnn", "!run-7") == ["run-5", "run-4", "run-2", "run-1"]


def test_name_of_another_script_keeps_columns_and_is_escaped_where_it_must(root: Path) -> None:
    assert runs("rename", "run-1", "e\u0301t-花朵").exit_code == 0
    name = "\u00e9t-花朵"
    assert runs(f"name={name[:2]}*", "--columns", "name,epoch").stdout.splitlines() == [
        "name     epochs",
        f"{name}     3/3",
    ]
    shown = subprocess.run(
        [GPUTRAIN, "runs", "--columns", "name", name], env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True, check=False,
    )  # fmt: skip
    assert (shown.returncode, shown.stderr, shown.stdout.decode("latin-1").split()) == (
        0, b"", ["name", "\u00e9t-\\u82b1\\u6735"],
    )  # fmt: skip


def test_runs_shows_columns_as_table_and_json(root: Path) -> None:
    table = runs("--columns", "name,lr,model,accuracy,duration,tags", "run-1").stdout
    assert table.splitlines() == [
        "name     lr  model     best val acc  duration  tags",
        "run-1  0.05  resnet18        0.3000     3m00s",
    ]
    values = json.loads(runs("--columns", "lr,seed", "--json", "run-1").stdout)
    assert values["format"] == 1
    assert values["runs"][0]["columns"] == {"optim.lr": 0.05, "run.seed": 1}
    assert values["runs"][0]["config"]["model.name"] == "resnet18" and values["runs"][0]["bottleneck"] is None


def test_runs_json_has_every_config_key_and_quiet_prints_names_alone(root: Path) -> None:
    config = json.loads(runs("--json", "run-1").stdout)["runs"][0]["config"]
    stored = parse_yaml((root / "run-1" / "config.yaml").read_text())
    assert config == {key: value for key, value in flat_values(stored).items() if key not in UNSTORED_KEYS} | {
        "run.name": "run-1"
    }
    result = runs("-q", "optim.name=adamw", "-failed")
    assert (result.stdout, result.stderr) == ("run-5\nrun-3\nrun-1\n", "")
    for option in ("--json", "--columns=name"):
        refused = runs("-q", option)
        assert refused.exit_code == 2
        assert says(refused.stderr, "conflict", "error: --quiet: ", option.partition("=")[0])


def test_runs_shows_the_cause_if_all_listed_runs_failed(root: Path) -> None:
    for name in ("run-0", "run-7"):
        append_events(RunFolder(root / name), RunFinished(state="failed", message=f"rank 1 of {name} was killed"))
    shown = runs("failed").stdout.splitlines()
    assert shown[0].split()[-1] == "cause" and shown[1].endswith("  rank 1 of run-7 was killed")
    assert "cause" not in runs().stdout


def test_runs_lists_trials_of_sweep_as_one_row_that_a_condition_opens(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "night").mkdir()
    (root / "night" / "sweep.yaml").touch()
    for number in range(3):
        runs("rename", f"run-{number + 4}", f"night-{number:03d}")
    # One run at a time, so that the list could end before the second trial is read.
    monkeypatch.setattr(run_list, "READ_SECONDS", 0.0)
    result = runs("-n", "2")
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [
        ["run-7", "failed", "3/3"],
        ["night", "finished", "3"],
    ]
    assert "3 trials" in result.stdout and "`gputrain runs sweep=night`" in result.stderr
    assert listed("sweep=night") == ["night-002", "night-001", "night-000"]
    # Scripts get the runs.
    assert runs("-q", "night").stdout.split() == ["night-002", "night-001", "night-000"]
    assert [row["sweep"] for row in json.loads(runs("--json", "night").stdout)["runs"]] == ["night"] * 3


def test_runs_without_match_says_so_and_unknown_key_is_refused(root: Path) -> None:
    result = runs("nothing")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"None of the 8 runs in {root} matches.\n"
    result = runs("--sort", "acuracy")
    assert result.exit_code == 2 and "did you mean accuracy?" in result.stderr


def test_runs_first_word_decides_between_command_and_query(root: Path) -> None:
    make_run_folder(root, "archive-me")
    assert listed("--", "archive") == ["archive-me"]
    assert listed("-n", "5", "--", "archive", "-tag=x") == ["archive-me"]
    result = runs("--json", "archive", "run-1")
    assert result.exit_code == 2 and "archive is a command: write `gputrain runs archive …`" in result.stderr
    assert not read_labels(RunFolder(root / "run-1")).archived


def test_tag_adds_and_removes_tags_of_several_runs(root: Path) -> None:
    assert runs("tag", "run-1", "run-2", "+night", "+old").exit_code == 0
    assert runs("tag", "run-1", "-old").stderr == "run-1: tags night\n"
    assert runs("tag", "run-1", "run-2").stdout == "run-1  night\nrun-2  night old\n"
    assert runs("tag", "run-1", "-night").stderr == "run-1: no tags\n"
    assert runs("tag", "run-1", "+night").stderr == "run-1: tags night\n"
    assert listed("tag=night", "-tag=old") == ["run-1"] and listed("old") == ["run-2"]
    result = runs("tag", "run-1", "+a b")
    assert result.exit_code == 2 and says(result.stderr, "invalid-value", "error: a b: ")
    assert runs("tag", "+night").exit_code == 2


def test_rename_says_that_it_watches_another_host(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runs.claim.HEARTBEAT_TIMEOUT_SECONDS", 0.2)
    claim = {"format": 1, "host": "node7", "pid": 7, "heartbeat": time.time() + 3600}
    (root / "run-1" / "owner.json").write_text(json.dumps(claim))
    said = runs("rename", "run-1", "best").stderr
    assert said.startswith("Watching the heartbeat of run-1 for up to ") and said.endswith("run-1 is now best.\n")


def test_delete_without_terminal_needs_yes(root: Path) -> None:
    result = runs("delete", "run-1")
    assert result.exit_code == 2
    assert says(result.stderr, "no-terminal", " delete: ", "--yes") and result.stderr.count("\n") == 1
    assert runs("delete", "run-1", "run-2", "--yes").exit_code == 0
    assert len(listed()) == 6 and len(list_trash(root)) == 2
    assert runs("restore", "run-2").stderr == "run-2 is restored.\n"
    assert runs("delete", "run-2", "-y").exit_code == 0
    assert runs("restore", "run-2", "again").stderr == "again is restored.\n"
    assert [line.split()[0] for line in runs("trash").stdout.splitlines()] == ["name", "run-1"]
    assert json.loads(runs("trash", "--json").stdout)["runs"][0]["files"] == 6
    assert runs("trash", "--empty").exit_code == 2 and len(list_trash(root)) == 1
    assert runs("trash", "--empty", "--yes").stderr == "Deleted 1 run.\n" and list_trash(root) == []


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("\n", 1)])
def test_delete_on_terminal_names_what_goes(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    monkeypatch.setattr("tui.cli.console.is_interactive", lambda: True)
    folder = RunFolder(root / "run-1")
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-00000001.pt").write_bytes(b"x" * (5 << 20))
    result = runs("delete", "run-1", answer=answer)
    assert "  run-1: 6 files, 5 MiB, 1 checkpoint\nMove 1 run to the trash? [y/N]:" in result.stderr
    assert result.exit_code == left and folder.path.exists() is bool(left)


def test_delete_names_moved_runs_where_another_cannot_be_moved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def move_unless_mounted(source: Path, target_folder: Path, name: str) -> Path:
        if name == "run-2":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return move_folder(source, target_folder, name)

    monkeypatch.setattr("engine.runs.manage.move_folder", move_unless_mounted)
    result = runs("delete", "run-1", "run-2", "--yes")
    assert result.exit_code == 2
    assert "run-1 is in the trash; `gputrain runs restore run-1` restores it." in result.stderr
    assert says(result.stderr, "not-writable", "error: run-2: ", "Device or resource busy")


def test_watch_prints_each_change_until_nobody_reads(tmp_path: Path) -> None:
    first, second = make_ended_runs(tmp_path, 2)
    command = [GPUTRAIN, "runs", "--watch", "--json", "--runs-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert {line["name"] for line in lines} == {first.name, second.name}
        assert json.loads(process.stdout.readline()) == {"format": 1, "listed": 2}
        shutil.rmtree(first.path)
        assert json.loads(process.stdout.readline()) == {"format": 1, "gone": first.name}
        process.stdout.close()
        assert process.wait(10) == 0


def test_watch_needs_json(root: Path) -> None:
    result = runs("--watch")
    assert result.exit_code == 2 and says(result.stderr, "conflict", "--watch", "--json")
