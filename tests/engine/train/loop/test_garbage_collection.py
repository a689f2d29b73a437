"""Garbage collection runs only between epochs and every GC_INTERVAL_STEPS, and training leaves no garbage."""

from __future__ import annotations

import gc

import pytest
import torch

from engine.train.loop.evaluation import evaluate
from engine.train.loop.loop import train_step
from engine.train.loop.memory import manual_gc
from support.runs.in_process import single_rank_trainer


@pytest.mark.parametrize(
    "recipe",
    [
        (),
        ("optim.accumulate=2", "optim.nonfinite=skip", "model.ema=0.9", "augment.mixup=0.2", "optim.clip_norm=1"),
        ("optim.name=adamw", "precision.amp=bf16", "loss.label_smoothing=0.1"),
    ],
)
def test_training_leaves_no_tensor_in_reference_cycles(recipe: tuple[str, ...]) -> None:
    with single_rank_trainer("data.batch_size=8", *recipe) as trainer, manual_gc():
        before = 0
        for number in range(50):
            train_step(trainer)
            if number == 10:
                before = tensors()
        assert tensors() <= before + 2 * trainer.config.run.log_every, (
            "more tensors than the step log keeps until it reports"
        )
        evaluate(trainer)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            leaked = [obj for obj in gc.garbage if isinstance(obj, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert leaked == []


def tensors() -> int:
    return sum(isinstance(obj, torch.Tensor) for obj in gc.get_objects())
