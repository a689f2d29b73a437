"""The learning rate range test on one rank: the steps of the training loop, with a learning rate that grows.

`train` calls `run_range_test` after the same setup as for training. The owner of the ranks draws the losses of the
`step` events; nothing is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.distributed.failures import NonFiniteLossError
from engine.models.freeze import set_train_mode
from engine.optim.lr_range import LossCurve, LrRange
from engine.training.job import Outcome
from engine.training.loop import train_step
from engine.training.memory import manual_gc
from engine.training.rank_state import RankState
from engine.training.trainer import Trainer
from engine.utils.errors import Problem


def run_range_test(trainer: Trainer, lr_range: LrRange, warnings: Sequence[Problem]) -> Outcome:
    """Train with the learning rates of `lr_range` until its end, until the loss diverges or all ranks agree to stop.

    `warnings` are emitted before the first step.
    """
    state, curve = trainer.state, LossCurve(lr_range)
    trainer.start_run(warnings)
    set_train_mode(state.model, state.network.frozen)
    with manual_gc() as trainer.collect_garbage:
        for _ in range(lr_range.steps):
            if trainer.handle_requests():
                return "stopped"
            if state.position.step_in_epoch == state.sampler.steps_per_epoch:
                state.start_epoch(state.position.epoch + 1)
            train_step(state)
            # The same loss on all ranks, so all of them end at the same step.
            if curve.add(_mean_loss(state)):
                break
        trainer.end_run("finished")
    return "finished"


def _mean_loss(state: RankState) -> float:
    """Return the loss of the last step, averaged over the ranks; infinity if it is not finite. A host sync."""
    try:
        [loss] = state.step_log.wait_pending()
    except NonFiniteLossError:
        return math.inf
    return loss if math.isfinite(loss) else math.inf
