"""`gputrain run --detach` and `gputrain queue`: runs that wait in the background, and what changes their place."""

from __future__ import annotations

import pytest

from engine.gpus.reservation import Reservation
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.gputrain_command import Gputrain
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


def test_refused_detached_run_leaves_nothing(busy_host: Gputrain) -> None:
    busy = busy_host("run", "digits", "--gpus", "free:1", "--detach")
    assert busy.returncode == 2
    assert says(busy.stderr, "gpu-in-use", "GPU 0: reserved by run holder")
    missing = busy_host("run", *CPU_RUN, "--detach", "--after", "nix")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert says(missing.stderr, "unknown-run", "error: queue.after: nix: ")
    assert not busy_host.runs.exists()
