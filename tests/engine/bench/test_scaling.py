"""Results of the scaling benchmark: from journals to epochs, speedups and tables."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bench.report import BenchRun, bench_run_from_history, scaling_results
from engine.runs.events import EpochEvent, RunStarted
from engine.runs.history import History, history_from_events
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_bench_run as make_run
from tui.cli.bench import bench_lines


def make_history(*epochs: tuple[float, float], started: float = 105.0) -> History:
    """Journal of a run with these epochs, as pairs of seconds and images/s."""
    return history_from_events(make_events(*epochs, started=started))


def make_events(*epochs: tuple[float, float], started: float = 105.0) -> list[RunStarted | EpochEvent]:
    started_event = replace(
        make_run_started(started), epochs=len(epochs), global_batch=64, steps_per_epoch=5, train_images=320
    )
    epoch_events = [
        replace(make_epoch(number), step=5 * number, seconds=seconds, images_per_second=rate)
        for number, (seconds, rate) in enumerate(epochs, 1)
    ]
    return [started_event, *epoch_events]


def test_bench_run_reads_epochs_from_journal() -> None:
    bench_run = bench_run_from_history(make_history((9.0, 40.0), (4.0, 80.0), (3.0, 100.0)), ranks=2, repeat=1)
    assert bench_run == BenchRun(2, 1, "", 64, ((9.0, 40.0), (4.0, 80.0), (3.0, 100.0)))


def test_bench_run_rejects_journal_with_single_epoch() -> None:
    assert "too short" in bench_run_from_history(make_history((9.0, 40.0)), 2, 1).message
    assert "too short" in bench_run_from_history(History(), 2, 1).message
    # NaN is null in a journal.
    nothing: Any = None
    assert "too short" in bench_run_from_history(make_history((9.0, 40.0), (4.0, nothing)), 2, 1).message


def test_scaling_computes_speedup_and_efficiency_from_throughput() -> None:
    speeds = scaling_results([make_run(4, 300), make_run(1, 100), make_run(2, 180)])
    assert [speed.ranks for speed in speeds] == [1, 2, 4]
    assert [speed.speed_up for speed in speeds] == [1, 1.8, 3]
    assert [speed.efficiency for speed in speeds] == [1, 0.9, 0.75]
    assert [speed.global_batch for speed in speeds] == [32, 64, 128]


def make_limit_run(ranks: int, *rates: float, repeat: int = 1) -> BenchRun:
    return replace(make_run(ranks, *rates, repeat=repeat), limit=True)


def test_scaling_compares_each_run_with_its_limit_run() -> None:
    runs = [
        make_run(1, 90, repeat=1),
        make_limit_run(1, 100, repeat=1),
        make_run(1, 30, repeat=2),
        make_limit_run(1, 40, repeat=2),
    ]
    [speed] = scaling_results([*runs, make_run(1, 50, repeat=3), make_limit_run(1, 100, repeat=3)])
    assert speed.images_per_second == 50
    assert speed.limit_images_per_second == 100
    assert speed.limit_share == pytest.approx(0.75), "median of 0.9, 0.75 and 0.5"


def test_bench_table_shows_limit_columns() -> None:
    bench_run = make_run(1, 2510)
    lines = list(
        bench_lines(scaling_results([bench_run, make_limit_run(1, 5020), make_run(2, 3000), make_limit_run(2, 6000)]))
    )
    assert [line.split() for line in lines[-3:]] == [
        ["ranks", "images/s", "limit", "share"],
        ["1", "2,510", "5,020", "50%"],
        ["2", "3,000", "6,000", "50%"],
    ]
    assert not any("limit" in line for line in bench_lines(scaling_results([bench_run])))


def test_scaling_without_single_rank_uses_fewest_ranks_as_baseline() -> None:
    speeds = scaling_results([make_run(2, 200), make_run(4, 300)])
    assert [speed.speed_up for speed in speeds] == [2, 3]
    assert "1 rank was not measured; the speedup of 2 ranks is assumed to be 2." in list(bench_lines(speeds))


def test_scaling_keeps_successful_runs_when_others_fail() -> None:
    speeds = scaling_results(
        [make_run(1, 100), BenchRun(2, 1, "out of memory"), make_run(4, 380), BenchRun(4, 2, "out of luck")]
    )
    assert [speed.speed_up for speed in speeds] == [1, None, 3.8]
    assert [speed.failures for speed in speeds] == [[], ["out of memory"], ["out of luck"]]
    lines = list(bench_lines(speeds))
    assert lines[2].split() == ["2", *["–"] * 5]
    assert lines[-2:] == ["2 ranks failed: out of memory", "4 ranks failed: out of luck"]
