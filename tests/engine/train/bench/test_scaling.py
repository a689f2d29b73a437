"""Results of the scaling benchmark: from journals to epochs, speedups and tables."""

from __future__ import annotations

from typing import Any

from engine.runs.events import EpochEvent, RunStarted
from engine.runs.history import History, history_from_events
from engine.train.bench.report import Speed, measure, with_speed_ups
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from tui.cli.bench import bench_lines


def make_history(*epochs: tuple[float, float]) -> History:
    """Journal of a run with these epochs, as pairs of seconds and images/s."""
    started = replace(make_run_started(105.0), global_batch=64)
    epoch_events: list[RunStarted | EpochEvent] = [
        replace(make_epoch(number), step=5 * number, seconds=seconds, images_per_second=rate)
        for number, (seconds, rate) in enumerate(epochs, 1)
    ]
    return history_from_events([started, *epoch_events])


def test_measure_takes_the_medians_of_epochs_behind_the_first() -> None:
    speed = measure(make_history((9.0, 40.0), (4.0, 80.0), (3.0, 100.0), (2.0, 110.0)), 2)
    assert speed == Speed(2, "", 64, 3.0, 100.0)


def test_measure_rejects_journal_without_a_second_epoch() -> None:
    assert "too short" in measure(make_history((9.0, 40.0)), 2).message
    assert "too short" in measure(History(), 2).message
    # NaN is null in a journal.
    nothing: Any = None
    assert "too short" in measure(make_history((9.0, 40.0), (4.0, nothing)), 2).message


def test_speed_ups_are_relative_to_the_fewest_ranks_that_were_measured() -> None:
    failed = Speed(1, "out of memory")
    speeds = with_speed_ups([Speed(4, images_per_second=300), failed, Speed(2, images_per_second=200)])
    assert [(speed.ranks, speed.speed_up, speed.efficiency) for speed in speeds] == [
        *((1, None, None), (2, 2, 1), (4, 3, 0.75))
    ]
    lines = list(bench_lines(speeds))
    assert lines[1].split() == ["1", *["–"] * 5]
    assert lines[-2:] == [
        "1 rank was not measured; the speedup of 2 ranks is assumed to be 2.",
        "1 rank failed: out of memory",
    ]
