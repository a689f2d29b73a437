"""Operations on the points of curves."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.series import Series, mean_and_spread


def test_mean_and_spread_are_those_of_the_runs_that_got_so_far() -> None:
    x = np.array([1.0, 2.0, 3.0])
    mean, (low, high) = mean_and_spread([Series(x, np.array([1.0, 2.0, 3.0])), Series(x[:2], np.array([3.0, 2.0]))])
    assert mean.x.tolist() == [1, 2, 3]
    assert mean.y.tolist() == [2, 2, 3]
    assert low.y[:2].tolist() == pytest.approx([2 - 2**0.5, 2.0])
    assert high.y[:2].tolist() == pytest.approx([2 + 2**0.5, 2.0])
    assert np.isnan(low.y[2])
