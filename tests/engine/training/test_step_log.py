"""The step log of two ranks: both halt at the same step if the loss of one of them is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from engine.distributed.channel import Channel
from engine.distributed.failures import NonFiniteLossError
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.runs.control import RequestCounters
from engine.training.step_log import SkippedSteps, StepLog
from engine.utils.process import SignalHandler
from support.runs.two_ranks import run_on_two_ranks

NAN_STEP = 3


def make_step_log(log_every: int) -> StepLog:
    """Return the log of a rank that halts at a non-finite loss, and emits no events."""
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    return StepLog(
        log_every=log_every,
        global_batch=2,
        device=torch.device("cpu"),
        channel=channel,
        skipped=SkippedSteps(max_consecutive=10),
        emits_events=False,
        may_skip=False,
    )


def add_step(log: StepLog, rank: int, step: int) -> None:
    """Add a step whose loss is NaN on rank 1 at `NAN_STEP`. The all-reduced gradient tells both ranks to skip it."""
    nonfinite = step == NAN_STEP
    loss = torch.tensor(math.nan if nonfinite and rank == 1 else 0.5)
    log.add(loss, torch.tensor(nonfinite), step, epoch=1, lr=0.1)


def train_until_halt(rank: int) -> Any:
    """Return the step in which this rank halts, with the code and the message of its error."""
    log = make_step_log(log_every=1)
    for step in range(1, 6):
        try:
            add_step(log, rank, step)
        except NonFiniteLossError as error:
            return step, error.code, str(error)
    return None


def save_before_report(rank: int) -> Any:
    """Return the code and the message of the error before a checkpoint, with losses that no event has reported yet."""
    log = make_step_log(log_every=10)
    for step in range(1, NAN_STEP + 1):
        add_step(log, rank, step)
    try:
        log.check_unreported(NAN_STEP, epoch=1, lr=0.1)
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
