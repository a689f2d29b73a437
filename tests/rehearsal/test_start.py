"""How two ranks on GPUs connect. NCCL opens connections in its first collectives."""

from __future__ import annotations

import pytest
import torch

from support.gpu.fake_cuda import Rehearsal, nccl_backend, run_started
from support.gputrain_command import read_events

RUN = ("digits", "--model", "linear", "--epochs", "1", "--gpus", "free:2")


@pytest.mark.rehearsal
@pytest.mark.parametrize("backend", ["auto", "nccl2"])
def test_nccl_connects_beside_gloo(rehearsal: Rehearsal, backend: str) -> None:
    if backend != "auto" and not torch.distributed.is_backend_available(backend):
        pytest.skip(f"torch {torch.__version__} has no backend {backend}")
    run = rehearsal.run("a", *RUN, f"device.backend={backend}")
    assert read_events(run)[-1]["state"] == "finished"
    assert run_started(run)["backend"] == (nccl_backend() if backend == "auto" else backend)
    connections = [sum("connects" in line for line in lines) for lines in rehearsal.cuda_log().values()]
    assert min(connections) > 1


@pytest.mark.rehearsal
def test_variables_of_outer_launcher_change_no_device(rehearsal: Rehearsal) -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = rehearsal.run("a", *RUN, "device.backend=nccl", **outer)
    started = run_started(run)
    assert (started["world_size"], started["start_method"]) == (2, "fork")
    assert [rank["index"] for rank in started["ranks"]] == [0, 1]
