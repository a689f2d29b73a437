"""Curves in blocks, x axes over sessions, and the cache of reduced curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.runs.curves import CurveData
from engine.runs.events import StepEvent
from engine.runs.reduced_curves import MAX_BLOCKS, RunCurves, reduce_curves
from engine.runs.series import Series, mean_and_spread
from engine.utils.files import file_stamp
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from tui.charts.compare_view import CompareData, ComparedCurves
from tui.charts.curve_cache import (
    FOLDER,
    MIN_JOURNAL_BYTES,
    CurveCache,
    decode_curves,
    encode_curves,
)

STAMP = (1, 2, 3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_data(steps: int, first: int = 0) -> CurveData:
    """A run with a loss of every step and one step event, an epoch of 10 steps."""
    data = CurveData()
    data.add(make_run_started(0.0))
    losses = [float(step % 7) for step in range(first, first + steps)]
    data.add(StepEvent(time=3600.0, step=steps, epoch=1, losses=losses, lr=0.1, images_per_second=1.0, data_wait=0.0))
    data.add(replace(make_epoch(1, 0.75), step=steps, metrics={"val/f1 x": 0.5}))
    return data


def test_reduce_keeps_extremes_and_means_of_each_block() -> None:
    data = make_data(100_000)
    data._losses.set(54_321, [1e6])
    loss = reduce_curves(data).metrics["train_loss"]
    assert loss.is_reduced
    assert len(loss.points.x) == 2 * len(loss.means.x) == 2 * MAX_BLOCKS
    assert loss.points.y.max() == 1e6
    assert loss.points.y.min() == 0.0
    plain = reduce_curves(make_data(100_000)).metrics["train_loss"].means.y
    assert np.abs(plain - 3.0).max() < 0.1


def test_reduce_keeps_short_curves_and_copies_them() -> None:
    data = make_data(50)
    curves = reduce_curves(data)
    loss = curves.metrics["train_loss"]
    data._losses.set(0, [99.0])
    assert not loss.is_reduced
    assert (len(loss.points.x), loss.points.y[0], curves.block_steps) == (50, 0.0, 1)


def test_reduce_takes_the_validation_of_the_ema_weights() -> None:
    data = make_data(10)
    data.add(replace(make_epoch(2, 0.5), step=20, ema_val_accuracy=0.875, ema_val_loss=0.25))
    curves = reduce_curves(data)
    assert curves.metrics["best_val_accuracy"].points.y.tolist() == [0.75, 0.875]
    assert curves.metrics["best_val_loss"].points.y.tolist() == [1.1, 0.25]
    assert curves.metrics["val_loss"].points.y.tolist() == [1.1, 0.55]
    assert curves.best is not None
    assert curves.best.accuracy == 0.875


def test_images_axis_adds_up_sessions_with_other_batches() -> None:
    data = CurveData()
    data.add(replace(make_run_started(0.0), global_batch=64))
    data.add(replace(make_run_resumed(10, 100.0), global_batch=32))
    data.add(replace(make_run_resumed(20, 200.0), global_batch=128))
    steps = np.array([0.0, 5.0, 10.0, 15.0, 20.0, 21.0])
    assert data.x_positions(steps, "images").tolist() == [0, 320, 640, 800, 960, 1088]
    # A session that resumes before the last one replaces it.
    data.add(replace(make_run_resumed(5, 300.0), global_batch=10))
    assert data.x_positions(steps, "images").tolist() == [0, 320, 370, 420, 470, 480]


def test_reduced_axes_agree_with_the_data() -> None:
    data = CurveData()
    data.add(make_run_started(0.0))
    for step in range(10, 60_000, 10):
        data.add(
            StepEvent(
                time=step * 0.5, step=step, epoch=1, losses=[1.0] * 10, lr=0.1, images_per_second=1.0, data_wait=0.0
            )
        )
    curves, steps = reduce_curves(data), np.array([1.0, 777.0, 59_990.0])
    for axis in ("epoch", "step", "images", "hours"):
        assert np.allclose(curves.axes.positions(steps, axis), data.x_positions(steps, axis))
        assert curves.last_x(axis) == pytest.approx(data.last_x(axis))


def assert_equal(first: RunCurves, second: RunCurves) -> None:
    assert first.metrics.keys() == second.metrics.keys()
    for metric in first.metrics:
        for part in ("points", "means"):
            one, other = getattr(first.metrics[metric], part), getattr(second.metrics[metric], part)
            assert np.array_equal(one.x, other.x)
            assert np.array_equal(one.y, other.y, equal_nan=True)
        assert first.metrics[metric].is_reduced == second.metrics[metric].is_reduced
    assert (first.last_step, first.nonfinite_count, first.best) == (
        second.last_step,
        second.nonfinite_count,
        second.best,
    )
    steps = np.array([1.0, 50.0])
    for axis in ("epoch", "images", "hours"):
        assert first.axes.positions(steps, axis).tolist() == second.axes.positions(steps, axis).tolist()


@pytest.mark.parametrize("steps", [50, 20_000])
def test_encoded_curves_round_trip(steps: int) -> None:
    curves = reduce_curves(make_data(steps))
    decoded = decode_curves(encode_curves(STAMP, curves), STAMP)
    assert decoded is not None
    assert_equal(curves, decoded)
    assert decode_curves(encode_curves(STAMP, reduce_curves(CurveData())), STAMP) is not None


def test_decode_curves_refuses_what_is_damaged() -> None:
    data = encode_curves(STAMP, reduce_curves(make_data(50)))
    assert decode_curves(data, (1, 2, 4)) is None
    assert decode_curves(data.replace(b'"format":1', b'"format":2'), STAMP) is None
    for damaged in (
        b"",
        b"{}",
        b"\n",
        data[:-8],
        data[:-1] + b"\x01",
        data.replace(b"x train_loss", b"z train_loss"),
        data + b"x",
    ):
        assert decode_curves(damaged, STAMP) is None
    for size in range(0, len(data), 97):
        assert decode_curves(data[:size], STAMP) is None


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * MIN_JOURNAL_BYTES)
    return path


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/gputrain" / FOLDER).iterdir())


def test_cache_keeps_curves_for_the_next_session(tmp_path: Path, journal: Path) -> None:
    stamp, curves = file_stamp(journal), reduce_curves(make_data(20_000))
    assert stamp is not None
    CurveCache().store(journal, stamp, curves, to_disk=True)
    loaded = CurveCache().load(journal, stamp)
    assert loaded is not None
    assert_equal(curves, loaded)
    assert len(cache_files(tmp_path)) == 1


def test_cache_ignores_and_rewrites_damaged_file(tmp_path: Path, journal: Path) -> None:
    stamp, curves = file_stamp(journal), reduce_curves(make_data(50))
    assert stamp is not None
    CurveCache().store(journal, stamp, curves, to_disk=True)
    (file,) = cache_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    assert CurveCache().load(journal, stamp) is None
    CurveCache().store(journal, stamp, curves, to_disk=True)
    assert CurveCache().load(journal, stamp) is not None


def test_cache_reads_no_file_that_others_can_change(tmp_path: Path, journal: Path) -> None:
    stamp = file_stamp(journal)
    assert stamp is not None
    CurveCache().store(journal, stamp, reduce_curves(make_data(50)), to_disk=True)
    cache_files(tmp_path)[0].chmod(0o666)
    assert CurveCache().load(journal, stamp) is None


def test_cache_of_other_journal_state_is_ignored(journal: Path) -> None:
    stamp, cache = file_stamp(journal), CurveCache()
    assert stamp is not None
    cache.store(journal, stamp, reduce_curves(make_data(50)), to_disk=True)
    assert cache.recall(journal) is not None
    journal.write_bytes(b"x")
    changed = file_stamp(journal)
    assert changed is not None
    assert cache.recall(journal) is None
    assert cache.load(journal, changed) is None


def test_mean_and_spread_are_those_of_the_runs_that_got_so_far() -> None:
    x = np.array([1.0, 2.0, 3.0])
    mean, (low, high) = mean_and_spread([Series(x, np.array([1.0, 2.0, 3.0])), Series(x[:2], np.array([3.0, 2.0]))])
    assert mean.x.tolist() == [1, 2, 3]
    assert mean.y.tolist() == [2, 2, 3]
    assert low.y[:2].tolist() == pytest.approx([2 - 2**0.5, 2.0])
    assert high.y[:2].tolist() == pytest.approx([2 + 2**0.5, 2.0])
    assert np.isnan(low.y[2])


def test_compare_data_has_a_band_for_a_group_and_differences_from_the_baseline() -> None:
    runs = [reduce_curves(make_data(50, first)) for first in range(3)]
    entries = [ComparedCurves("A", "seeds", 1, tuple(runs[:2])), ComparedCurves("B", "other", 2, (runs[2],))]
    data = CompareData(entries, 1)
    group, other = data.curves_for("train_loss", "step")
    assert group.band is not None
    assert group.reference is other.values
    assert (other.band, other.reference, other.mark) == (None, None, "B")
    assert data.last_x("epoch") == 5.0
