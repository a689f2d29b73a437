"""Ticks of linear and logarithmic axes, and their labels."""

from __future__ import annotations

import pytest

from engine.base.ticks import log_ticks, tick_labels, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, ["0.0", "0.5", "1.0"]),
        (0.02, 0.03, ["0.020", "0.025", "0.030"]),
        (0, 15, ["0", "5", "10", "15"]),
        (-5, 3, ["-4", "-2", "0", "2"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[str]) -> None:
    assert tick_labels(ticks(low, high, 5)) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, ["0", "1"]), (0, 3.2, ["0", "1", "2", "3"]), (0, 200, ["0", "50", "100", "150", "200"])],
)
def test_ticks_of_epochs_are_whole(low: float, high: float, expected: list[str]) -> None:
    assert tick_labels(ticks(low, high, 8, whole=True)) == expected


@pytest.mark.parametrize(
    ("low", "high", "max_ticks", "expected"),
    [
        (1e-4, 3, 6, ["0.0001", "0.001", "0.01", "0.1", "1"]),
        (1e-4, 3, 3, ["0.0001", "0.01", "1"]),
        (0.012, 0.9, 4, ["0.03", "0.1", "0.3"]),
        (0.3, 30, 6, ["0.5", "1", "2", "5", "10", "20"]),
        (0.82, 1.91, 8, ["1", "1.2", "1.4", "1.6", "1.8"]),
        (1.1, 8.9, 2, ["2", "5"]),
    ],
)
def test_log_ticks_lie_between_powers_of_ten_where_these_are_few(
    low: float, high: float, max_ticks: int, expected: list[str]
) -> None:
    assert tick_labels(log_ticks(low, high, max_ticks), log=True) == expected
