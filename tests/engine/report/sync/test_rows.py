"""Rows of metrics from the events of a journal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.report.sync.rows import Row, read_rows
from engine.runs.events import Event, GpuEvent, StepEvent
from engine.runs.journal import from_line, to_line
from engine.runs.records import GpuSample
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step


def losses(last: int, count: int, time: float = 10.0, loss: float | None = 0.5) -> StepEvent:
    return replace(make_step(last, time=time), losses=[loss] * count)  # type: ignore[list-item]


def rows_of(events: Iterable[Event], *resumed_from: int, ended: bool = True) -> list[Row]:
    return [*read_rows(events, resumed_from, ended=ended)]


def test_each_loss_has_row_with_time_of_its_event() -> None:
    rows = rows_of([make_run_started(time=8.0), losses(4, 4, time=10.0), losses(6, 2, time=11.0)])
    assert [(row.step, row.time) for row in rows] == [(1, 10.0), (2, 10.0), (3, 10.0), (4, 10.0), (5, 11.0), (6, 11.0)]
    assert rows[0].metrics == {"train/loss": 0.5}
    assert set(rows[3].metrics) == {
        "train/loss",
        "train/lr",
        "train/images_per_second",
        "train/data_wait",
        "train/grad_norm",
    }


def test_epoch_is_part_of_its_last_step_before_and_after_losses() -> None:
    before = rows_of([make_run_started(), make_epoch(1), losses(12, 12)])
    after = rows_of([make_run_started(), losses(10, 10), make_epoch(1), losses(12, 2)])
    for rows in (before, after):
        assert [row.step for row in rows] == list(range(1, 13))
        assert [row.step for row in rows if "val/accuracy" in row.metrics] == [10]


def test_epoch_whose_losses_a_crash_lost_joins_latest_row() -> None:
    rows = rows_of([make_run_started(), losses(7, 7), make_epoch(1)])
    assert (rows[-1].step, rows[-1].metrics["train/epoch"]) == (7, 1)


def test_resume_repeats_no_step_that_counts() -> None:
    first = [make_run_started(), losses(8, 8), make_epoch(1)]
    rows = rows_of([*first, make_run_resumed(5, time=20.0), losses(8, 4, time=21.0, loss=0.25)], 5)
    assert [row.step for row in rows] == list(range(1, 9))
    assert [row.metrics["train/loss"] for row in rows] == [0.5] * 5 + [0.25] * 3
    assert not any("val/accuracy" in row.metrics for row in rows)


def test_loss_that_is_not_finite_is_nan_after_reading_journal() -> None:
    read = from_line(to_line(replace(losses(2, 1), losses=[0.5, math.nan], grad_norm=math.inf)))
    assert read is not None
    rows = rows_of([make_run_started(), read])
    assert math.isnan(rows[1].metrics["train/loss"])
    assert math.isnan(rows[1].metrics["train/grad_norm"])
    old = from_line(to_line(losses(1, 1)).replace(',"grad_norm":2.0', ""))
    assert old is not None
    assert "train/grad_norm" not in rows_of([make_run_started(), old])[0].metrics


def test_readings_of_gpus_of_run_join_next_losses_once() -> None:
    started = replace(make_run_started(), devices=["GPU-a", "GPU-b"])
    sample = GpuEvent(time=5.0, gpus=[GpuSample("GPU-b", util=90.0, power=None), GpuSample("GPU-other", util=1.0)])
    rows = rows_of([started, sample, losses(2, 2), losses(4, 2)])
    readings = [{name: value for name, value in row.metrics.items() if name.startswith("gpu/")} for row in rows]
    assert readings == [{}, {"gpu/1/util_percent": 90.0}, {}, {}]
