"""`gputrain run --detach` and `gputrain queue`: runs that wait in the background, and what changes their place."""

from __future__ import annotations

import json
from functools import partial

import pytest

from engine.gpus.reservation import Reservation
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.gputrain_command import Gputrain, wait_for
from support.messages import says

CPU_RUN = ["digits", "--gpus", "cpu", "--ranks", "1", "--epochs", "1", "--model", "linear"]


@pytest.fixture
def busy_host(gputrain: Gputrain, gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> Gputrain:
    """A host whose only GPU is reserved by another run, for as long as the test takes."""
    gpu_host.set_scene([gpu_line(0)])
    gputrain.environment |= gpu_host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", gpu_host.environment["GPUTRAIN_RESERVATIONS"])
    holder = Reservation()
    holder.reserve([gpu_uuid(0)], "0", [gpu_uuid(0)], "holder")
    return gputrain


def run_state(gputrain: Gputrain, name: str) -> str:
    rows = json.loads(gputrain("runs", "--json").stdout)["runs"]
    return next(str(row["state"]) for row in rows if row["name"] == name)


def is_failed(gputrain: Gputrain, name: str) -> bool:
    return run_state(gputrain, name) == "failed"


@pytest.mark.nightly
def test_detached_run_that_is_held_says_so_with_the_command_that_goes_on(gputrain: Gputrain) -> None:
    line = ["run", "--gpus", "cpu", "--queue", "--detach", "--", "sh", "-c", "echo no such file; exit 1"]
    for name in (gputrain(*line).stdout.strip(), gputrain(*line).stdout.strip()):
        wait_for(partial(is_failed, gputrain, name), "the failure of the command")
    held = gputrain(*line)
    name = held.stdout.strip()
    assert held.returncode == 0
    assert held.stderr.startswith(f"{name} waits: held: ") and f"`gputrain queue release {name}`" in held.stderr
    assert "no such file" in held.stderr and held.stderr.count("\n") == 1
    assert gputrain("stop", name).returncode == 0


def test_refused_detached_run_leaves_nothing(busy_host: Gputrain) -> None:
    busy = busy_host("run", "digits", "--gpus", "free:1", "--detach")
    assert busy.returncode == 2
    assert says(busy.stderr, "gpu-in-use", "GPU 0: reserved by run holder")
    missing = busy_host("run", *CPU_RUN, "--detach", "--after", "nix")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert says(missing.stderr, "unknown-run", "error: queue.after: nix: ")
    assert not busy_host.runs.exists()
