"""The step log of two ranks: both halt at the same step if the loss of one of them is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.runs.control import RequestCounters
from engine.train.distributed.channel import Channel
from engine.train.distributed.failures import NonFiniteLossError
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.data import Position
from engine.train.loop.log import MicroBatchResult, TrainingLog
from support.runs.two_ranks import run_on_two_ranks

NAN_STEP = 3


def make_log(log_every: int, rank: int) -> TrainingLog:
    """Return the log of a rank that halts at a non-finite loss."""
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    config = resolve_config(None, [f"run.log_every={log_every}"]).config
    return TrainingLog(config, torch.device("cpu"), channel, rank, Position(), global_batch=2)


def add_step(log: TrainingLog, rank: int, step: int) -> None:
    """Add a step whose loss is NaN on rank 1 at `NAN_STEP`. The all-reduced gradient tells both ranks to skip it."""
    nonfinite = step == NAN_STEP
    loss = torch.tensor(math.nan if nonfinite and rank == 1 else 0.5)
    log._position.step = step
    log.add_step([MicroBatchResult(loss, torch.tensor(1), 1, 1.0)], torch.tensor(nonfinite), {}, lr=0.1)


def train_until_halt(rank: int) -> Any:
    """Return the step in which this rank halts, with the code and the message of its error."""
    log = make_log(1, rank)
    for step in range(1, 6):
        try:
            add_step(log, rank, step)
        except NonFiniteLossError as error:
            return step, error.code, str(error)
    return None


def save_before_report(rank: int) -> Any:
    """Return the code and the message of the error before a checkpoint, with losses that no event has reported yet."""
    log = make_log(10, rank)
    for step in range(1, NAN_STEP + 1):
        add_step(log, rank, step)
    try:
        log.check()
    except NonFiniteLossError as error:
        return error.code, str(error)
    return None


def test_step_log_halts_both_ranks_in_same_step_and_names_rank_with_nan(tmp_path: Path) -> None:
    first, second = run_on_two_ranks(tmp_path, train_until_halt)
    assert first == second
    step, code, message = first
    # The group of a step is read when the next step is added.
    assert (step, code) == (NAN_STEP + 1, "non-finite")
    assert f"step {NAN_STEP} " in message and " rank 1" in message


def test_step_log_halts_both_ranks_before_a_checkpoint_with_nan_of_one_rank(tmp_path: Path) -> None:
    first, second = run_on_two_ranks(tmp_path, save_before_report)
    assert first == second
    code, message = first
    assert code == "non-finite"
    assert f"step {NAN_STEP} " in message and " rank 1" in message
