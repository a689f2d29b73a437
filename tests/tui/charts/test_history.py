"""The store of past readings, its graph, and meters."""

from __future__ import annotations

import pytest

from tui.charts.history import LoadHistory, history_graph, shown_seconds, time_axis
from tui.charts.meter import meter
from tui.terminal.palette import LOADS, TRACK

NOW = 1_760_000_000.0


def history_of(values: list[float | None], step_s: float = 1.0) -> LoadHistory:
    """A history whose last value is at NOW."""
    history = LoadHistory()
    for index, value in enumerate(values):
        history.add(NOW - (len(values) - 1 - index) * step_s, value)
    return history


def test_columns_average_their_values_keep_gaps_and_hold_a_value_between_samples_but_not_for_long() -> None:
    assert history_of([float(value) for value in range(120)], 1.0).columns(100, 10)[-1] == sum(range(109, 119)) / 10
    assert history_of([10.0, None, 30.0]).columns(3, 3) == [10.0, None, 30.0]
    assert history_of([10.0, 20.0], step_s=30.0).columns(4, 4) == [None, None, None, 20.0]
    assert history_of([10.0, 20.0, 30.0], step_s=3.0).columns(6, 6) == [10.0, 10.0, 20.0, 20.0, 20.0, 30.0]


def test_history_columns_only_move_while_time_passes() -> None:
    history = history_of([float(value % 7) for value in range(300)])
    before = history.columns(200, 20)
    history.add(NOW + 1, 3.0)
    after = history.columns(200, 20)
    assert before[:-1] == after[:-1] or before[1:-1] == after[:-2]


def test_history_survives_clock_set_back() -> None:
    history = history_of([10.0])
    history.add(NOW - 1_000_000, 20.0)
    assert history.columns(3, 3)[-1] == 20.0


def test_history_graph_is_taller_for_larger_values() -> None:
    (bottom,) = history_graph([0.0, 25.0, 50.0, 100.0], 1)
    assert bottom.plain == "⣀⣼"
    top, bottom = history_graph([100.0, 100.0, 50.0, 50.0], 2)
    assert (top.plain, bottom.plain) == ("⣿ ", "⣿⣿")


def test_time_axis_has_labels_at_round_times() -> None:
    assert time_axis(636, 53).plain.split() == ["-10", "min", "-5", "min", "now"]
    assert time_axis(90, 50).plain.split() == ["-90", "s", "-60", "s", "-30", "s", "now"]
    assert time_axis(588, 24).plain.startswith("-10 min")
    assert time_axis(3 * 3600, 60).plain.split() == ["-3", "h", "-2", "h", "-1", "h", "now"]
    assert time_axis(636, 53).plain.index("-5") == round((1 - 300 / 636) * 53)


def test_shown_seconds_are_those_of_the_columns() -> None:
    seconds, count = 600.0, 106
    columns = history_of([50.0] * 700).columns(seconds, count)
    assert shown_seconds(seconds, count) == 636
    assert columns.count(50.0) == pytest.approx(600 / 6, abs=1)


def test_meter_fills_whole_cells() -> None:
    filled = [meter(share, 4, LOADS[0]).spans[:1] for share in (0.0, 0.3, 1.0, 7.0)]
    assert [[(span.end, span.style) for span in spans] for spans in filled[1:]] == [
        [(1, LOADS[0])],
        [(4, LOADS[0])],
        [(4, LOADS[0])],
    ]
    assert filled[0][0].style == TRACK
