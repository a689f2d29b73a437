"""`gputrain run --detach`: what is refused says so to the shell, and leaves nothing."""

from __future__ import annotations

import pytest

from engine.gpus.reservation import Reservation
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.gputrain_command import Gputrain
from support.messages import says


def test_refused_detached_run_leaves_nothing(
    gputrain: Gputrain, gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_host.set_scene([gpu_line(0)])
    gputrain.environment |= gpu_host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", gpu_host.environment["GPUTRAIN_RESERVATIONS"])
    holder = Reservation()
    holder.reserve([gpu_uuid(0)], "0", [gpu_uuid(0)], "holder")
    busy = gputrain("run", "digits", "--gpus", "free:1", "--detach")
    assert (busy.returncode, busy.stdout) == (2, "")
    assert says(busy.stderr, "gpu-in-use", "GPU 0: reserved by run holder")
    assert not gputrain.runs.exists()
