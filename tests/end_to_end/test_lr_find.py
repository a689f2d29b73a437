"""`gputrain lr-find`: the same suggestion for any number of ranks, nothing left behind, and `--set`."""

from __future__ import annotations

import json
import signal

import pytest
from typer.testing import CliRunner

from engine.train.optim.lr_range import LrRange
from support.gputrain_command import Gputrain
from support.messages import says
from tui.cli.main import app

ENDLESS = ("lr-find", "digits", "--gpus", "cpu", "--ranks", "1", "--to", "1e-5", "--steps", "10000", "--json")


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


@pytest.mark.nightly
def test_lr_find_suggests_same_lr_for_one_and_two_ranks_with_the_same_global_batch(gputrain: Gputrain) -> None:
    found = []
    for ranks in (1, 2):
        batches = ("--gpus", "cpu", "--ranks", str(ranks), "--batch-size", str(64 // ranks))
        done = gputrain("lr-find", "digits", *batches, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(each["diverged"] and 1e-3 < each["valley"] < 1e-1 for each in found)
    one, two = (grid_step(each["valley"]) for each in found)
    assert abs(one - two) <= 1


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_lr_find_leaves_nothing_when_interrupted(gputrain: Gputrain, number: signal.Signals) -> None:
    """The fixture checks that no process and no shared memory remains."""
    process = gputrain.start(*ENDLESS)
    assert process.stdout is not None and any('"lr_step"' in line for line in process.stdout)
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
