"""A sweep killed and continued has every result once, and a pruned trial resumes to the bits of an unpruned run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.status import SweepReader
from support.gputrain_command import Gputrain, effective_events, last_checkpoint_weights, read_events
from support.runs.in_process import train_in_process

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
