"""The sweep of a script with real processes: each trial runs once although the controller is killed, and pruned trials
leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.gpus.reservation_reader import read_reservations
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.status import SweepReader, SweepStatus
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import Gputrain, read_events, wait_for

SCRIPT = """\
import sys, time
lr, steps, pause = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with open("starts.txt", "a") as file:
    file.write(f"{lr!r}\\n")
for step in range(1, steps + 1):
    time.sleep(pause)
    print(f"step {step} loss: {1 / step:.4f} val/acc: {(1 - lr) * step / steps:.4f}", flush=True)
"""
# A small network in torch whose loss falls with each step.
TORCH_SCRIPT = """\
import argparse, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--batch-size", type=int)
arguments = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
for step in range(1, 19):
    inputs = torch.randn(arguments.batch_size, 8)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} val/loss: {loss.item():.5f}", flush=True)
    time.sleep(0.4)
"""


def status(gputrain: Gputrain, name: str = "s") -> SweepStatus:
    return SweepReader(SweepFolder(gputrain.runs / name)).poll()


def status_if_any(gputrain: Gputrain) -> Mapping[str, int]:
    """Return the number of trials by state."""
    return status(gputrain).counts if (gputrain.runs / "s" / "sweep.yaml").exists() else {}


@pytest.mark.nightly
def test_pruned_trials_on_gpus_leave_no_reservation_and_no_process(
    gputrain: Gputrain, gpu_host: FakeGpuHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_host.set_scene([gpu_line(0), gpu_line(1)])
    gputrain.environment |= gpu_host.environment | {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", gpu_host.environment["GPUTRAIN_RESERVATIONS"])
    (tmp_path / "fit.py").write_text(SCRIPT)
    words = [sys.executable, "fit.py", "{lr}", "18", "0.3"]
    options = ["--name", "s", "--gpus", "0,1", "--parallel", "2", "--sampler", "grid", "--cwd", str(tmp_path)]
    values = ",".join(f"0.{number}" for number in range(1, 9))
    process = gputrain.start("sweep", "--maximize", "val/acc", f"lr={values}", *options, "--", *words)
    wait_for(lambda: "pruned" in status_if_any(gputrain), "a pruned trial", 120)
    pruned = {row.run for row in status(gputrain).trials if row.state == "pruned"}
    assert pruned.isdisjoint(each.run for each in read_reservations())
    _, lines = process.communicate(timeout=120)
    assert process.returncode == 0, lines
    assert sum(status(gputrain).counts.values()) == 8
    assert read_reservations() == [] and not gputrain.processes()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sweep_of_a_torch_script_killed_twice_runs_each_trial_once(gputrain: Gputrain, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(TORCH_SCRIPT)
    space = ["lr=log:1e-4..1e-1", "bs=16,32,64"]
    words = [sys.executable, str(script), "--lr", "{lr}", "--batch-size", "{bs}"]
    options = ["--name", "s", "--gpus", "cpu", "--trials", "12", "--parallel", "3", "--cwd", str(tmp_path)]
    sweep = ["sweep", "--minimize", "val/loss", *space, *options, "--", *words]
    for first in (1, 5):
        process = gputrain.start(*sweep, stderr=subprocess.DEVNULL)
        sweep = ["sweep", "resume", "s"]
        journal = gputrain.runs / f"s-{first:03d}" / "events.jsonl"
        wait_for(journal.exists, f"the beginning of trial {first}", 600)
        process.kill()
        process.wait()
    process = gputrain.start(*sweep)
    _, lines = process.communicate(timeout=1500)
    assert process.returncode == 0, lines
    shown = status(gputrain)
    print(lines, dict(shown.counts))
    assert [row.number for row in shown.trials] == list(range(12))
    assert sum(shown.counts.get(state, 0) for state in ("complete", "pruned")) == 12
    assert shown.counts.get("pruned")
    for row in shown.trials:
        types = [event["type"] for event in read_events(gputrain.runs / row.run)]
        assert (types.count("command_started"), types.count("run_finished")) == (1, 1), row.run
        assert row.value is not None
    assert not gputrain.processes()
    assert json.loads(gputrain("queue", "--json").stdout)["queue"] == []
