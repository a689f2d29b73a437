"""How the ranks connect: the backend, its timeouts, and GPUs that two ranks share."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist

from engine.config.loader import resolve_config
from engine.train.distributed.node_plan import NodePlan
from engine.train.distributed.process_group import join_process_group, nccl_heartbeat_timeout_s, torch_backend
from engine.train.distributed.rank_env import RankInfo
from support.messages import raises_problem


@pytest.fixture
def torch_without_nccl2(monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"nccl", "gloo"}
    monkeypatch.setattr(dist, "is_backend_available", available.__contains__)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.usefixtures("torch_without_nccl2")
def test_legacy_backend_is_nccl_where_torch_has_one_implementation() -> None:
    assert [torch_backend(name) for name in ("nccl-legacy", "nccl", "gloo")] == ["nccl", "nccl", "gloo"]


@pytest.mark.usefixtures("torch_without_nccl2")
def test_missing_backend_is_refused_with_version_of_torch() -> None:
    with raises_problem("not-supported", "device.backend", "nccl2", torch.__version__):
        torch_backend("nccl2")


@pytest.mark.parametrize(("collective", "heartbeat"), [(60, 480), (660, 660), (10**8, 2_000_000)])
def test_nccl_heartbeat_outlasts_collectives_within_32_bits(collective: float, heartbeat: int) -> None:
    assert nccl_heartbeat_timeout_s(collective) == heartbeat
    assert 1000 * nccl_heartbeat_timeout_s(collective) < 2**31


def test_shared_gpu_is_refused_before_the_group_is_created() -> None:
    store, host = dist.HashStore(), os.uname().nodename
    devices = [{"rank": 1, "host": host, "pid": 2, "device": "GPU-0"}]
    store.set("devices/1", json.dumps({"devices": devices, "network": "", "reachable": True}))
    plan = NodePlan(("GPU-0",), (None,), 1, 1, 0, "nccl-legacy")
    with raises_problem("gpu-in-use", "device.gpus", "GPU-0"):
        join_process_group(resolve_config(None, []).config, plan, torch.device("cuda", 0), RankInfo(0, 2, 0, 1), store)
    assert not dist.is_initialized()
