"""`gputrain sweep`: what it refuses, the list of sweeps, and which sweep a name means."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.jobs.command.spec import Program, write_command
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.settings import SweepSettings, read_settings
from support.gputrain_command import Gputrain
from support.messages import says
from support.runs.sweeps import SETTINGS, make_finished_trials, make_sweep
from tui.cli.completions import complete_sweeps
from tui.cli.main import app

SEARCHED = ("digits", "optim.lr=0.1,0.2", "--gpus", "cpu")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def sweep(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments], prog_name="gputrain")


@pytest.mark.parametrize(
    ("options", "code", "location", "values"),
    [
        (["--minimize", "best_val_accuracy"], "conflict", "--minimize", ["--maximize best_val_accuracy"]),
        (["--minimize", "best_val_los"], "unknown-value", "--minimize", ["metrics.NAME", "best_val_loss?"]),
        (["--maximize", "val_loss", "--minimize", "val_loss"], "conflict", "--maximize", ["--minimize"]),
        (["--epochs", "2..3"], "invalid-value", "run.epochs", ["run.epochs=2..3"]),
        (["--lr", "0.3"], "duplicate-key", "optim.lr", []),
    ],
)
def test_sweep_run_refuses_option(root: Path, options: list[str], code: str, location: str, values: list[str]) -> None:
    result = sweep(*SEARCHED, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {location}: ") and says(result.stderr, code, *values)
    assert not root.exists()


def test_sweep_list_shows_latest_result_first(root: Path) -> None:
    older, _ = make_finished_trials(root, name="older")
    make_sweep(root, SETTINGS, "planned")
    newer, _ = make_finished_trials(root, name="newer")
    os.utime(older.journal, (1e9, 1e9))
    result = sweep("list")
    assert (result.exit_code, result.stderr) == (0, "")
    header, *rows = (line.split() for line in result.stdout.splitlines())
    assert header == ["name", "state", "trials", "best", "metric", "age"]
    # The last of nine trials has not ended.
    assert [row[:5] for row in rows[:2]] == [
        [name, "not", "running", "8/12", "0.9500"] for name in (newer.name, older.name)
    ]
    assert rows[2] == ["planned", "not", "running", "0/12", "–", "best_val_accuracy", "–"]
    first = json.loads(sweep("list", "--json").stdout)["sweeps"][0]
    shown = json.loads(sweep("show", "--json").stdout)
    assert (
        (first["name"], first["best"]) == (shown["name"], shown["best"]["value"]) == ("newer", shown["best"]["value"])
    )


def test_sweep_list_warns_of_sweeps_that_cannot_be_read(root: Path) -> None:
    make_finished_trials(root, count=2)
    make_sweep(root, SETTINGS, "damaged").settings.write_text("format: 1")
    open_to_all = make_sweep(root, SETTINGS, "shared")
    open_to_all.path.chmod(0o777)
    result = sweep("list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["name", "s"]
    assert says(result.stderr, "damaged", "warning: ") and says(result.stderr, "foreign-writable", "shared")
    assert len(json.loads(sweep("list", "--json", "--trust-owner").stdout)["sweeps"]) == 2


SCRIPT = ("lr=0.5,0.25", "--gpus", "cpu", "--name", "fit")


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ([*SCRIPT, "--", "true", "{lr}"], "missing-value", ["metric", "--maximize METRIC"]),
        (["digits", "--maximize", "acc", *SCRIPT, "--", "true", "{lr}"], "conflict", ["digits"]),
        (["--maximize", "acc", *SCRIPT, "--epochs", "3", "--", "true", "{lr}"], "no-effect", ["--epochs 3"]),
        (["--maximize", "acc", *SCRIPT, "--", "no-such-program", "{lr}"], "command-not-found", ["no-such-program"]),
        ([*SEARCHED, "--cwd", "/"], "conflict", ["--cwd", "-- COMMAND"]),
    ],
)
def test_sweep_of_a_script_refuses_line(root: Path, arguments: list[str], code: str, values: list[str]) -> None:
    result = sweep(*arguments)
    assert result.exit_code == 2 and says(result.stderr, code, *values), result.stderr
    assert not root.exists()


def test_script_sweep_of_another_user_runs_its_command_only_with_trust(root: Path) -> None:
    typed = Program(argv=("touch", "{lr}"), cwd="/", cwd_inode=1, environment={"PATH": "/bin"})
    settings = SweepSettings(
        space={"lr": "1,2"}, command="touch {lr}", metric="metrics.acc=high", device={"device.gpus": "cpu"}
    )
    folder = make_sweep(root, settings)
    write_command(folder, typed)
    folder.command.chmod(0o666)
    assert says(sweep("resume", "s").stderr, "foreign-writable", "command.json")
    refused = sweep("resume", "s", "--trust-owner")
    assert refused.exit_code == 2 and says(refused.stderr, "untrusted-code", "s")
    assert "command: touch '{lr}'" in refused.stderr and not folder.journal.exists()


def test_sweep_resume_refuses_what_cannot_change(root: Path) -> None:
    folder: SweepFolder = make_sweep(root)
    for option in ("--sampler", "--epochs"):
        result = sweep("resume", option, "1")
        assert result.exit_code == 2 and says(result.stderr, "unknown-option", f"error: {option}: ")
    for option in ("--trials", "--parallel"):
        for words in (["resume"], ["digits", "optim.lr=0.1,0.2"]):
            result = sweep(*words, option, "0")
            assert result.exit_code == 2 and result.stderr.startswith(f"error: {option}: ")
    assert not folder.journal.exists()


def test_sweep_resume_stores_number_of_trials_and_ends_without_trials_left(gputrain: Gputrain) -> None:
    folder, study = make_finished_trials(gputrain.runs)
    study.end(8, "COMPLETE", 0.5)
    folder.config.write_text(to_yaml(as_stored(resolve_config("digits").config)))
    done = gputrain("sweep", "resume", "--trials", "9")
    assert done.returncode == 0, done.stderr
    assert "best: trial " in done.stderr and read_settings(folder.settings).trials == 9
    detached = gputrain("sweep", "resume", "s", "--parallel", "3", "--detach")
    assert (detached.returncode, detached.stdout) == (0, "s\n"), detached.stderr
    assert "`gputrain sweep show s`" in detached.stderr and read_settings(folder.settings).parallel == 3


def test_complete_sweeps_returns_names_and_last(root: Path) -> None:
    for name in ("long", "short"):
        make_sweep(root, SETTINGS, name)
    context = SimpleNamespace(params={"runs_dir": str(root)})
    assert complete_sweeps(context, "l") == ["long", "last"]
    assert complete_sweeps(context, "x") == complete_sweeps(SimpleNamespace(params={"runs_dir": "~nobody9"}), "s") == []
