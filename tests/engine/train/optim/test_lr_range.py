"""Learning rate range test: its learning rates, smoothing, the end at divergence, and its suggestions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from engine.train.optim.lr_range import LossCurve, LrRange
from support.messages import raises_problem


def add_losses(lr_range: LrRange, loss_at: Callable[[float], float]) -> LossCurve:
    """Return the curve of a loss that depends on the learning rate alone, up to its divergence."""
    curve = LossCurve(lr_range)
    for step in range(1, lr_range.steps + 1):
        if curve.add(loss_at(lr_range.lr_at(step))):
            break
    return curve


def sigmoid_loss(lr: float, middle: float = 1e-2) -> float:
    """A loss that falls from 2.1 to 0.1, fastest at `middle`."""
    return 0.1 + 2 / (1 + (lr / middle) ** 2)


def grid_steps(lr_range: LrRange, lr: float, other: float) -> float:
    return abs(math.log(lr / other)) / math.log(lr_range.lr_at(2) / lr_range.low)


def suggestion_of(curve: LossCurve) -> float:
    suggestion = curve.suggest()
    assert suggestion is not None
    return suggestion


@pytest.mark.parametrize(
    ("lr_range", "location", "values"),
    [
        (LrRange(0.0), "--from", (" 0, ", " 0")),
        (LrRange(math.nan), "--from", (" 0, ", "nan")),
        (LrRange(0.1, 0.1), "--to", ("--from, 0.1, ",)),
        (LrRange(1e-3, math.inf), "--to", ("inf",)),
    ],
)
def test_lr_range_check_names_problem(lr_range: LrRange, location: str, values: tuple[str, ...]) -> None:
    with raises_problem("out-of-range", location, *values):
        lr_range.check()


@pytest.mark.parametrize("last", [math.nan, math.inf, 1e6])
def test_loss_curve_diverges_at_huge_or_nonfinite_loss(last: float) -> None:
    curve = LossCurve(LrRange())
    assert not any(curve.add(1.0) for _ in range(50))
    assert curve.add(last)
    assert curve.diverged


def test_suggestions_are_robust_against_noise() -> None:
    lr_range, rng = LrRange(), np.random.default_rng(3)
    exact = suggestion_of(add_losses(lr_range, sigmoid_loss))
    for _ in range(20):
        noisy = suggestion_of(add_losses(lr_range, lambda lr: float(sigmoid_loss(lr) * rng.uniform(0.9, 1.1))))
        assert grid_steps(lr_range, noisy, exact) <= 3


@pytest.mark.parametrize("steps", [20, 100, 400])
def test_noise_alone_suggests_nothing(steps: int) -> None:
    rng = np.random.default_rng(4)
    curves = [add_losses(LrRange(steps=steps), lambda _: float(rng.normal(2.3, 0.2))) for _ in range(100)]
    assert [curve.suggest() for curve in curves] == [None] * 100


@pytest.mark.parametrize(
    "loss_at", [lambda lr: 2.3, lambda lr: 2.3 + lr, lambda lr: math.nan, lambda lr: 2.3 * (1 - 1e-3 * (lr > 1e-2))]
)
def test_loss_that_does_not_fall_suggests_nothing(loss_at: Callable[[float], float]) -> None:
    assert add_losses(LrRange(), loss_at).suggest() is None
