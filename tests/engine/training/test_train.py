"""The setup of a rank: how long it waits for the other ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore

from engine.config.loader import resolve_config
from engine.data.sources.open import open_source
from engine.distributed.channel import DirectChannel, StopFlag
from engine.distributed.node_plan import plan_node
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import RendezvousTimeoutError
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.runs.control import RequestCounters
from engine.training.job import Job
from engine.training.train import train


def test_train_names_missing_rank_after_device_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    overrides = ["model.name=linear", "device.ranks=2", "device.gpus=cpu", "device.timeout=0.5"]
    config = resolve_config("digits", overrides).config
    job = Job(config, plan_node(config, []), None, False, open_source(config))
    channel = DirectChannel(print, StopFlag(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    with pytest.raises(RendezvousTimeoutError, match=r"rank 1 did not join the process group within 0\.5 s"):
        train(job, RankInfo(0, 2, 0, 2), HashStore(), channel)
