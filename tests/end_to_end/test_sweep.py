"""A sweep killed and continued has every result once, and a pruned trial resumes to the bits of an unpruned run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.sweeps.folder import SweepFolder
from engine.sweeps.status import SweepReader
from support.gputrain_command import Gputrain, effective_events, last_checkpoint_weights, read_events, wait_for
from support.runs.in_process import train_in_process

TRIALS = int(os.environ.get("GPUTRAIN_SWEEP_TRIALS", "12"))

COMMON = ["run.epochs=6", "device.ranks=1", "device.gpus=cpu", "device.threads=1"]


def show(gputrain: Gputrain, name: str) -> dict[str, Any]:
    return SweepReader(SweepFolder(gputrain.runs / name)).poll().to_dict()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.mark.nightly
def test_sweep_survives_kill_and_pruned_trial_resumes_to_the_bits_of_an_unpruned_run(
    gputrain: Gputrain, tmp_path: Path
) -> None:
    # No such learning rate trains anything, so the trial after the preset is pruned.
    sweep = ["sweep", "digits", "optim.lr=log:1e-7..1e-6", *COMMON, "--trials", "2", "--pruner", "asha", "--name", "s"]
    killed = gputrain.start(*sweep)
    gputrain.wait_for_event("s-000", "epoch", 1)
    kill(killed)
    continued = gputrain("sweep", "resume", "s")
    assert continued.returncode == 0, continued.stderr
    status = show(gputrain, "s")
    preset, pruned = status["trials"]
    assert (preset["state"], preset["preset"], preset["params"]) == ("complete", True, {})
    assert (pruned["state"], pruned["reason"]) == ("pruned", "pruned after epoch 1")
    assert status["best"] == preset
    assert [event["type"] for event in read_events(gputrain.runs / "s-000")].count("run_started") == 1
    assert read_events(gputrain.runs / "s-001")[-1]["state"] == "stopped"

    resumed = gputrain("resume", "s-001")
    assert resumed.returncode == 0, resumed.stderr
    whole = train_in_process(tmp_path / "whole", *COMMON, f"optim.lr={pruned['params']['optim.lr']!r}")
    epochs = [event for event in effective_events(gputrain.runs / "s-001") if "val_loss" in event]
    assert [event["val_loss"] for event in epochs] == [event.val_loss for event in whole]
    weights = last_checkpoint_weights(gputrain.runs / "s-001")
    expected = last_checkpoint_weights(tmp_path / "whole")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def kill_supervisor(gputrain: Gputrain, rng: random.Random) -> None:
    """Kill the supervisor of a random live trial, if there is one."""
    supervisors = [process for process in gputrain.processes() if "--headless" in process.cmdline()]
    if supervisors:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(supervisors).pid, signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sweep_of_digits_killed_at_random_moments_has_every_result_once(gputrain: Gputrain) -> None:
    rng = random.Random(time.time_ns())  # noqa: S311
    sweep = ["sweep", "digits", "optim.lr=log:1e-3..0.5", "optim.name=sgd,adamw", "run.epochs=4", "device.ranks=1"]
    sweep += ["--trials", str(TRIALS), "--parallel", "2", "--name", "s"]
    moments = [(trial, rng.uniform(0, 6)) for trial in sorted(rng.sample(range(TRIALS), 3))]
    for trial, seconds in moments:
        process = gputrain.start(*sweep, stderr=subprocess.DEVNULL)
        sweep = ["sweep", "resume", "s"]
        journal = gputrain.runs / f"s-{trial:03d}" / "events.jsonl"
        wait_for(journal.exists, f"the beginning of trial {trial}", 300)
        time.sleep(seconds)
        # One supervisor of a trial dies before the controller, one after it.
        kill_supervisor(gputrain, rng)
        kill(process)
        kill_supervisor(gputrain, rng)
    done = gputrain(*sweep)
    assert done.returncode == 0, done.stderr
    print("killed so many seconds after the beginning of a trial:", moments, "\n", done.stderr)
    status = show(gputrain, "s")
    assert [row["number"] for row in status["trials"]] == list(range(TRIALS))
    assert status["counts"].keys() <= {"complete", "pruned"}
    assert sum(status["counts"].values()) == TRIALS
    assert status["trials"][0]["preset"]
    assert status["best"]["value"] >= status["trials"][0]["value"]
    assert sorted(path.name for path in gputrain.runs.glob("s-*")) == [f"s-{number:03d}" for number in range(TRIALS)]
    for row in status["trials"]:
        epochs = [event["epoch"] for event in effective_events(gputrain.runs / row["run"]) if "val_loss" in event]
        assert epochs == list(range(1, len(epochs) + 1))
        assert len(epochs) == 4 or row["state"] == "pruned"
        assert row["value"] is not None
    wait_for(lambda: not gputrain.processes(), "the end of all processes", 15)
