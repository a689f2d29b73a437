"""The learning rate: a function of the step, equal to torch's own schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from engine.config import Optim, Schedule
from engine.schedule import lr_factor, scaled_lr

STEPS, EPOCHS = 7, 12


def ours(**values: object) -> list[float]:
    schedule = Schedule(**values)  # type: ignore[arg-type]
    return [lr_factor(schedule, step, STEPS, EPOCHS) for step in range(1, STEPS * EPOCHS + 1)]


def torchs(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], *, by_epoch: bool) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    seen = []
    for step in range(1, STEPS * EPOCHS + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not by_epoch or step % STEPS == 0:
            scheduler.step()
    return seen


def test_constant() -> None:
    assert set(ours(name="constant")) == {1.0}


def test_step_equals_torchs() -> None:
    expected = torchs(lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.3), by_epoch=True)
    assert ours(name="step", step_size=5, gamma=0.3) == pytest.approx(expected)


def test_multistep_equals_torchs() -> None:
    expected = torchs(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 8], 0.2), by_epoch=True)
    assert ours(name="multistep", milestones=(3, 8), gamma=0.2) == pytest.approx(expected)


def test_cosine_equals_torchs() -> None:
    def make(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CosineAnnealingLR(optimizer, STEPS * EPOCHS, eta_min=0.1)

    assert ours(name="cosine", final_lr_ratio=0.1) == pytest.approx(torchs(make, by_epoch=False))


def test_warm_up_grows_linearly_to_the_whole_rate_and_cosine_takes_the_rest() -> None:
    rates = ours(name="cosine", warmup_epochs=2.0)
    assert rates[:14] == pytest.approx([(step + 1) / 14 for step in range(14)])
    rest = STEPS * EPOCHS - 14
    assert rates[14:] == pytest.approx([(1 + math.cos(math.pi * step / rest)) / 2 for step in range(rest)])


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_rate_is_scaled_by_the_ranks(scaling: str, factor: float) -> None:
    assert scaled_lr(Optim(lr=0.1, lr_scaling=scaling), 4) == pytest.approx(0.1 * factor)  # type: ignore[arg-type]
