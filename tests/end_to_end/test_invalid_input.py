"""Invalid requests are rejected immediately: one error line, exit code 2, no run folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine.runs.ownership import claim_run
from support.gputrain_command import FinishedRun, Gputrain, SharedGputrain
from support.messages import says
from tui.cli.main import app

# Rejected by the config alone.
WRONG = {
    "unknown key": (["optim.lrr=1"], "unknown-key", "optim.lrr", "did you mean optim.lr?"),
    "wrong type": (["--epochs", "many"], "invalid-value", "run.epochs", "'many'"),
    "missing file": (["gone.yaml"], "not-found", "gone.yaml", "cifar10-fast, "),
    "second config": (["digits", "more"], "too-many", "more", "digits"),
    "key without equals sign": (["optim.lr", "0.1"], "missing-value", "optim.lr", "optim.lr=VALUE"),
    "unknown dataset": (["--dataset", "digitz"], "unknown-value", "data.dataset", "digits, mnist"),
    "unknown optimizer": (["--optimizer", "sgdd"], "unknown-value", "optim.name", "module:name; did you mean sgd?"),
    "data path not given": (["--dataset", "mnist"], "missing-value", "data.path", "mnist"),
    "two values": (["--lr", "0.1", "optim.lr=0.2"], "conflict", "optim.lr", "--lr 0.1 and optim.lr=0.2"),
    "name no folder can have": (["--name", "../a"], "invalid-name", "run.name", "'../a'"),
    "resume of no name": (["--resume"], "needs-key", "run.resume", "run.name (--name)"),
    "ngpu against gpus": (["--ngpu", "1", "--gpus", "cpu"], "conflict", "--ngpu", "--gpus free:1"),
    "value that is no YAML": (["--lr", "{"], "invalid-yaml", "optim.lr", "'{'"),
}  # fmt: skip

# Rejected after checking the host: files, devices, dataset and environment.
REFUSED = {
    "unknown model": (["--model", "resnet18-smal"], "unknown-value", "model.name", "'resnet18-smal'"),
    "no GPU": (["--gpus", "0"], "driver-unavailable", "device.gpus", "--gpus cpu"),
    "env without torchrun": (["--launcher", "env"], "invalid-value", "--launcher env", "RANK"),
}  # fmt: skip


@pytest.fixture
def call(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call the command in this process."""
    monkeypatch.chdir(gputrain.folder)
    return lambda *arguments: CliRunner(env=dict(gputrain.environment)).invoke(app, arguments)


@pytest.mark.parametrize(("arguments", "code", "location", "value"), WRONG.values(), ids=WRONG.keys())
def test_run_rejects_invalid_config(
    gputrain: Gputrain, call: Callable[..., Result], arguments: list[str], code: str, location: str, value: str
) -> None:
    done = call("run", "--headless", *arguments)
    assert done.exit_code == 2
    assert says(done.stderr, code, f"error: {location}: ", value)
    assert done.stdout == ""
    assert not gputrain.runs.exists()


def test_run_rejects_config_of_unknown_user_without_list_of_presets(call: Callable[..., Result]) -> None:
    done = call("run", "--headless", "~nobody-of-that-name/x.yaml")
    assert done.exit_code == 2
    assert says(done.stderr, "not-found", "error: ~nobody-of-that-name/x.yaml: ")
    assert "cifar10-fast" not in done.stderr


@pytest.mark.parametrize(("arguments", "code", "location", "value"), REFUSED.values(), ids=REFUSED.keys())
def test_run_rejects_unavailable_resources(
    gputrain: Gputrain, arguments: list[str], code: str, location: str, value: str
) -> None:
    done = gputrain("run", "--headless", *arguments)
    assert done.returncode == 2
    assert says(done.stderr, code, f"error: {location}: ", value)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not gputrain.runs.exists()


def test_run_rejects_circular_base_configs(gputrain: Gputrain, call: Callable[..., Result]) -> None:
    (gputrain.folder / "a.yaml").write_text("base: a.yaml")
    done = call("run", "--headless", "a.yaml")
    assert done.exit_code == 2
    assert says(done.stderr, "invalid-value", "error: base: ", "a.yaml")
    assert not gputrain.runs.exists()


@pytest.mark.nightly
def test_run_rejects_model_that_ranks_cannot_build_and_leaves_no_folder(gputrain: Gputrain) -> None:
    done = gputrain("run", "--headless", "digits", "--model", "alexnet")
    assert done.returncode == 2
    start, line = done.stderr.splitlines()
    assert start.startswith("digits-1: starting in ")
    assert says(line, "not-supported", "error: model.name: alexnet ", "1x8x8")
    assert not gputrain.runs.exists()


def test_run_rejects_existing_name_and_keeps_its_journal(
    short_run: FinishedRun, shared_gputrain: SharedGputrain
) -> None:
    before = (short_run.path / "events.jsonl").read_text()
    done = shared_gputrain("run", "--headless", "digits", "--name", "short")
    assert done.returncode == 2
    assert says(done.stderr, "name-in-use", "error: run.name: ", "short", "--resume")
    assert (short_run.path / "events.jsonl").read_text() == before


def test_stop_reports_finished_run(short_run: FinishedRun, shared_gputrain: SharedGputrain) -> None:
    done = shared_gputrain("stop", "short")
    assert (done.returncode, done.stderr) == (0, "short is not running: it is finished.\n")


def test_resume_rejects_run_owned_by_another_process(gputrain: Gputrain) -> None:
    claimed = claim_run(gputrain.runs, "mine", "x", resume=False)
    done = gputrain("run", "--headless", "digits", "--name", "mine", "--resume")
    assert done.returncode == 2
    assert says(done.stderr, "already-running", "error: mine: ", f"process {os.getpid()} ")
    claimed.ownership.release()


@pytest.mark.parametrize("folder", ["file/runs", "/proc/runs"])
def test_run_rejects_unwritable_runs_folder(gputrain: Gputrain, call: Callable[..., Result], folder: str) -> None:
    (gputrain.folder / "file").write_text("")
    done = call("run", "--headless", "digits", "--runs-dir", folder)
    assert done.exit_code == 2
    assert says(done.stderr, "not-writable", f"{folder} ", "--runs-dir")


@pytest.mark.parametrize("command", ["stop", "resume", "logs"])
def test_command_rejects_unknown_run(gputrain: Gputrain, call: Callable[..., Result], command: str) -> None:
    done = call(command, "gone")
    assert done.exit_code == 2
    assert says(done.stderr, "unknown-run", "error: gone: ", f" {gputrain.runs};", "--runs-dir")


def test_run_rejects_config_that_is_not_utf8(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00run")
    done = call("run", "--headless", "bytes.yaml")
    assert done.exit_code == 2
    assert says(done.stderr, "wrong-format", "error: bytes.yaml: ")


def test_run_reports_problems_of_all_sections_together(gputrain: Gputrain) -> None:
    overrides = {
        "optim.lrr": "1", "run.epochs": "many", "schedule.name": "multistep", "augment.crop_scale": "[2, 1]",
        "optim.options": "{alpha: 1}", "model.name": "resnt18", "model.weights": "nowhere.pt", "loss.name": "mine:x",
        "augment.transform": "nope:f", "data.dataset": "folder", "data.path": "/nowhere", "precision.amp": "fp8",
        "device.init_method": "tcp://host:1", "checkpoint.keep": "0", "device.gpus": "7",
    }  # fmt: skip
    done = gputrain("run", "--headless", *(f"{key}={value}" for key, value in overrides.items()))
    locations = [line.removeprefix("error: ").split(":")[0] for line in done.stderr.splitlines()]
    expected = {*overrides, "schedule.milestones"} - {"schedule.name", "data.dataset"}
    assert (done.returncode, set(locations)) == (2, expected)
    assert not gputrain.runs.exists()
