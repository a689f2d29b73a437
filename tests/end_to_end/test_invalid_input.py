"""Invalid requests are rejected immediately: one error line, exit code 2, no run folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.runs.claimed_run import claim_run
from support.gputrain_command import FinishedRun, Gputrain, SharedGputrain
from tui.cli.main import app

# Rejected by the config alone.
WRONG = {
    "unknown key": (["optim.lrr=1"], "optim.lrr: unknown key; did you mean optim.lr?"),
    "wrong type": (["--epochs", "many"], "run.epochs: 'many' is not allowed: must be an integer"),
    "missing file": (["gone.yaml"], "gone.yaml: no such file or preset"),
    "second config": (["digits", "more"], "is a second CONFIG after digits"),
    "key without equals sign": (["optim.lr", "0.1"], "optim.lr: is a config key and needs a value"),
    "unknown dataset": (["--dataset", "digitz"], "must be one of digits, mnist"),
    "unknown optimizer": (["--optimizer", "sgdd"], "timm:NAME, or user code as module:name; did you mean sgd?"),
    "data path not given": (["--dataset", "mnist"], "data.path: mnist needs the folder of the dataset"),
    "two values": (["--lr", "0.1", "optim.lr=0.2"], "is set to different values by"),
    "name no folder can have": (["--name", "../a"], "must start with a letter or digit"),
    "resume of no name": (["--resume"], "run.resume: needs the name of the run"),
    "ngpu against gpus": (["--ngpu", "1", "--gpus", "cpu"], "--ngpu: means --gpus free:1"),
    "value that is no YAML": (["--lr", "{"], "optim.lr: the value '{' is not valid YAML"),
    "no such user": (["~nobody-of-that-name/x.yaml"], "there is no such user; use the full path"),
}  # fmt: skip

# Rejected after checking the host: files, devices, dataset and environment.
REFUSED = {
    "unknown model": (["--model", "resnet18-smal"], "no model is named 'resnet18-smal'"),
    "no GPU": (["--gpus", "0"], "device.gpus: 0 cannot be used"),
    "env without torchrun": (["--launcher", "env"], "RANK is not set; start with torchrun"),
}  # fmt: skip


@pytest.fixture
def call(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call the command in this process."""
    monkeypatch.chdir(gputrain.folder)
    return lambda *arguments: CliRunner(env=dict(gputrain.environment)).invoke(app, arguments)


@pytest.mark.parametrize("arguments, message", WRONG.values(), ids=WRONG.keys())
def test_run_rejects_invalid_config(
    gputrain: Gputrain, call: Callable[..., Result], arguments: list[str], message: str
) -> None:
    done = call("run", "--headless", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert not gputrain.runs.exists()


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_run_rejects_unavailable_resources(gputrain: Gputrain, arguments: list[str], message: str) -> None:
    done = gputrain("run", "--headless", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not gputrain.runs.exists()


def test_run_rejects_circular_base_configs(gputrain: Gputrain, call: Callable[..., Result]) -> None:
    (gputrain.folder / "a.yaml").write_text("base: a.yaml")
    done = call("run", "--headless", "a.yaml")
    assert (done.exit_code, "circular base files" in done.stderr) == (2, True)
    assert not gputrain.runs.exists()


def test_run_rejects_model_that_ranks_cannot_build_and_leaves_no_folder(gputrain: Gputrain) -> None:
    done = gputrain("run", "--headless", "digits", "--model", "alexnet")
    assert done.returncode == 2
    start, line = done.stderr.splitlines()
    assert start.startswith("digits-1: starting in ")
    assert line.startswith("error: model.name: alexnet does not accept 1x8x8 images")
    assert not gputrain.runs.exists()


def test_run_rejects_existing_name_and_keeps_its_journal(
    short_run: FinishedRun, shared_gputrain: SharedGputrain
) -> None:
    before = (short_run.path / "events.jsonl").read_text()
    done = shared_gputrain("run", "--headless", "digits", "--name", "short")
    assert done.returncode == 2
    assert "the run short already exists" in done.stderr
    assert "--resume" in done.stderr
    assert (short_run.path / "events.jsonl").read_text() == before


def test_stop_reports_finished_run(short_run: FinishedRun, shared_gputrain: SharedGputrain) -> None:
    done = shared_gputrain("stop", "short")
    assert (done.returncode, done.stderr) == (0, "short is not running: it is finished.\n")


def test_resume_rejects_run_owned_by_another_process(gputrain: Gputrain) -> None:
    claimed = claim_run(gputrain.runs, "mine", "x", resume=False)
    done = gputrain("run", "--headless", "digits", "--name", "mine", "--resume")
    assert done.returncode == 2
    assert f"mine: is already running as process {os.getpid()}" in done.stderr
    claimed.ownership.release()


@pytest.mark.parametrize("folder", ["file/runs", "/proc/runs"])
def test_run_rejects_unwritable_runs_folder(gputrain: Gputrain, call: Callable[..., Result], folder: str) -> None:
    (gputrain.folder / "file").write_text("")
    done = call("run", "--headless", "digits", "--runs-dir", folder)
    assert done.exit_code == 2
    assert "cannot be written to" in done.stderr
    assert "--runs-dir" in done.stderr


@pytest.mark.parametrize("command", ["stop", "resume", "logs"])
def test_command_rejects_unknown_run(call: Callable[..., Result], command: str) -> None:
    done = call(command, "gone")
    assert done.exit_code == 2
    assert "there are no runs in" in done.stderr


def test_run_rejects_config_that_is_not_utf8(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00run")
    done = call("run", "--headless", "bytes.yaml")
    assert (done.exit_code, "is not UTF-8 text" in done.stderr) == (2, True)


def test_run_reports_problems_of_all_sections_together(gputrain: Gputrain) -> None:
    overrides = {
        "optim.lrr": "1", "run.epochs": "many", "schedule.name": "multistep", "augment.crop_scale": "[2, 1]",
        "optim.options": "{alpha: 1}", "model.name": "resnt18", "model.weights": "nowhere.pt", "loss.name": "mine:x",
        "augment.transform": "nope:f", "data.dataset": "folder", "data.path": "/nowhere", "precision.amp": "fp8",
        "device.init_method": "tcp://host", "checkpoint.keep": "0", "device.gpus": "7",
    }  # fmt: skip
    done = gputrain("run", "--headless", *(f"{key}={value}" for key, value in overrides.items()))
    locations = [line.removeprefix("error: ").split(":")[0] for line in done.stderr.splitlines()]
    expected = {*overrides, "schedule.milestones"} - {"schedule.name", "data.dataset"}
    assert (done.returncode, set(locations)) == (2, expected)
    assert not gputrain.runs.exists()
