"""The setup of a rank: how long it waits for the other ranks, and where a resumed run continues."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.runs.control import RequestCounters
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.open import open_source
from engine.train.distributed.channel import Channel
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import RendezvousTimeoutError
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.data import resume_position
from engine.train.loop.job import Job
from engine.train.loop.train import train
from support.messages import raises_problem


def test_train_names_missing_rank_after_device_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    overrides = ["model.name=linear", "device.ranks=2", "device.gpus=cpu", "device.timeout=0.5"]
    config = resolve_config("digits", overrides).config
    job = Job(config, plan_node(config, []), None, False, open_source(config))
    channel = Channel(print, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    store = HashStore()
    store.set_timeout(timedelta(seconds=config.device.timeout))
    with raises_problem("timed-out", None, " 1 ", "0.5 s", kind=RendezvousTimeoutError):
        train(job, RankInfo(0, 2, 0, 2), store, channel)


@pytest.mark.parametrize(
    ("batch_size", "step_in_epoch"),
    [(10, 5), (7, 8), (30, 2), (100, 1), (5, 10)],
    ids=["same", "smaller", "larger", "whole epoch in one step", "shorter epoch"],
)
def test_resume_position_repeats_no_image_with_another_batch_size(batch_size: int, step_in_epoch: int) -> None:
    saved = {"epoch": 3, "step_in_epoch": 5, "step": 25, "global_batch": 10}
    position = resume_position(saved, DistributedBatchSampler(100, 10, batch_size, 0, 1, True, 0))
    assert (position.epoch, position.step_in_epoch, position.step) == (3, step_in_epoch, 25)


def test_resume_position_ends_epoch_without_enough_images_for_a_step() -> None:
    saved = {"epoch": 3, "step_in_epoch": 9, "step": 29, "global_batch": 10}
    assert resume_position(saved, DistributedBatchSampler(100, 10, 40, 0, 1, True, 0)).step_in_epoch == 2
