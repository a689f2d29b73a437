"""`gputrain lr-find`: the same suggestion for any number of ranks, nothing left behind, and `--set`."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.optim.lr_range import LrRange
from support.gputrain_command import Gputrain, SharedGputrain
from support.messages import says
from tui.cli.main import app

ENDLESS = ("lr-find", "digits", "--gpus", "cpu", "--ranks", "1", "--to", "1e-5", "--steps", "10000", "--json")


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def grid_step(lr: float) -> int:
    lr_range = LrRange()
    return min(range(1, lr_range.steps + 1), key=lambda step: abs(lr_range.lr_at(step) - lr))


def files_of(gputrain: Gputrain) -> list[str]:
    """Return the files outside the caches that the command did not remove."""
    return [
        str(path.relative_to(gputrain.folder))
        for path in gputrain.folder.rglob("*")
        if path.is_file() and "cache" not in path.parts
    ]


def run_lr_find(gputrain: Gputrain, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Return the output of the test on the digits with a global batch size of 64."""
    batches = ("--gpus", "cpu", "--ranks", str(ranks), "--batch-size", str(64 // ranks))
    done = gputrain("lr-find", "digits", *batches, "--json", *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json_lines(done.stdout)


@pytest.fixture(scope="session")
def one_and_two_ranks(shared_gputrain: SharedGputrain) -> list[list[dict[str, Any]]]:
    return shared_gputrain.once("suggestions", lambda gputrain: [run_lr_find(gputrain, ranks) for ranks in (1, 2)])


@pytest.mark.nightly
def test_lr_find_suggests_same_lr_for_one_and_two_ranks(one_and_two_ranks: list[list[dict[str, Any]]]) -> None:
    one, two = (output[-1] for output in one_and_two_ranks)
    assert one["type"] == two["type"] == "lr_found"
    assert one["diverged"]
    assert two["diverged"]
    assert abs(grid_step(one["valley"]) - grid_step(two["valley"])) <= 1
    assert all(1e-3 < found["valley"] < 1e-1 for found in (one, two))


@pytest.mark.nightly
def test_lr_find_trains_global_batch_of_all_ranks(one_and_two_ranks: list[list[dict[str, Any]]]) -> None:
    for ranks, output in zip((1, 2), one_and_two_ranks, strict=True):
        [started] = [line for line in output if line["type"] == "run_started"]
        assert (started["world_size"], started["global_batch"]) == (ranks, 64)
    steps = [[line for line in output if line["type"] == "lr_step"] for output in one_and_two_ranks]
    assert [line["lr"] for line in steps[0][:50]] == [LrRange().lr_at(step) for step in range(1, 51)]
    # The first 22 steps are one epoch of the same images. BatchNorm sees half of them on each of two ranks.
    assert [line["loss"] for line in steps[0][:20]] == pytest.approx([line["loss"] for line in steps[1][:20]], rel=0.02)


@pytest.mark.nightly
def test_lr_find_keeps_no_files(one_and_two_ranks: list[list[dict[str, Any]]], shared_gputrain: SharedGputrain) -> None:
    assert [name for name in files_of(shared_gputrain) if "lr-find" in name] == []


def wait_for_first_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any('"lr_step"' in line for line in process.stdout)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_lr_find_leaves_nothing_when_interrupted(gputrain: Gputrain, number: signal.Signals) -> None:
    """The fixture checks that no process and no shared memory remains."""
    process = gputrain.start(*ENDLESS)
    wait_for_first_step(process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (1 if number == signal.SIGINT else -number), errors
    assert '"lr_found"' not in output
    assert number == signal.SIGKILL or '"control"' in output
    assert not gputrain.runs.exists()
    assert files_of(gputrain) == []


@pytest.mark.nightly
def test_lr_find_warns_of_typed_keys_that_it_does_not_use(gputrain: Gputrain) -> None:
    typed = ("--resume", "--name", "x", "--epochs", "3", "--lr", "0.3", "--after", "a", "checkpoint.keep=4")
    done = gputrain("lr-find", "digits", "--gpus", "cpu", "--ranks", "1", "--model", "linear", "--steps", "20", *typed)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert {line.split()[1].partition("=")[0] for line in warnings if says(line, "no-effect")} == {
        *("run.name", "run.resume", "run.epochs", "optim.lr", "queue.after", "checkpoint.keep")
    }
    assert "up to 20 steps" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "location", "values"),
    [
        (["digits", "--set"], "not-writable", "--set", ["digits"]),
        (["--dataset", "digits", "--set"], "missing-value", "--set", ["CONFIG"]),
        (["digits", "--from", "1", "--to", "0.1"], "out-of-range", "--to", ["--from, 1", "0.1"]),
        (["digits", "--gpus", "cpu", "optim.momentum=2"], "out-of-range", "optim.momentum", ["2 ", "1"]),
    ],
)
def test_lr_find_refuses_with_one_line(
    gputrain: Gputrain, arguments: list[str], code: str, location: str, values: list[str]
) -> None:
    done = CliRunner(env=dict(gputrain.environment)).invoke(app, ["lr-find", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert says(done.stderr, code, f"error: {location}: ", *values)
    assert isinstance(done.exception, SystemExit)
    assert not gputrain.runs.exists()
