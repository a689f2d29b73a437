"""Foreign runs in the form of our own: keys of the registry, axes, bounded curves, and logs that grow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.report.foreign_run import describe, read_whole
from engine.runs.curves import CurveReader, default_axis
from engine.runs.metrics import Better, foreign_metric, registry_keys
from engine.watch.folders import find_runs


def make_data(folder: Path, rows: list[dict[str, float]]) -> CurveReader:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [run] = find_runs(folder).runs
    data = CurveReader(run)
    data.read()
    return data


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (
            ["train/loss", "Loss/val", "val_acc", "lr-SGD"],
            {"train/loss": "train_loss", "Loss/val": "val_loss", "val_acc": "val_accuracy"},
        ),
        # The name that comes first in the table counts; the other one stays a metric of its own.
        (["valid_loss", "val_loss"], {"val_loss": "val_loss"}),
        # A bare loss is that of the training only beside one of the validation.
        (["loss"], {}),
        (["loss", "eval_loss"], {"loss": "train_loss", "eval_loss": "val_loss"}),
    ],
)
def test_names_of_other_trainers_get_the_key_of_the_registry_that_means_the_same(
    names: list[str], keys: dict[str, str]
) -> None:
    assert registry_keys(names) == keys


def test_metric_of_unknown_meaning_has_no_direction() -> None:
    directions = {name: foreign_metric(name).better for name in ("val_ppl", "mAP50", "top1", "epoch_time", "norm")}
    low, high, neither = Better.LOW, Better.HIGH, Better.NEITHER
    assert directions == {"val_ppl": low, "mAP50": high, "top1": high, "epoch_time": neither, "norm": neither}


def test_values_that_are_not_finite_are_counted_and_leave_gaps(tmp_path: Path) -> None:
    data = make_data(tmp_path, [{"step": 1, "a": 1.0}, {"step": 2, "a": float("nan")}, {"step": 3, "a": float("inf")}])
    curves = data.curves
    assert curves.count_not_finite(curves.names) == 2
    np.testing.assert_array_equal(curves.over("a", "step").points.y, [1, np.nan, np.nan])
    record = describe(data).record
    assert (record.values["metrics.a"], record.values["highest_metrics.a"]) == (None, 1.0)
    assert record.values["odd_step.metrics.a"] == 2


def test_curve_of_the_validation_is_that_of_the_best_epoch_too(tmp_path: Path) -> None:
    data = make_data(tmp_path, [{"step": 1, "val/loss": 0.5}, {"step": 2, "val/loss": 0.25}])
    curves = data.curves
    np.testing.assert_array_equal(curves.over(curves.name_of("best_val_loss"), "step").points.y, [0.5, 0.25])
    assert curves.has("best_val_loss") and not curves.has("best_val_accuracy")


def test_epochs_are_the_axis_unless_many_steps_have_the_same(tmp_path: Path) -> None:
    rows = [{"step": step, "epoch": step, "a": 1.0} for step in range(4)]
    assert default_axis([make_data(tmp_path, rows).curves]) == "epoch"
    rows = [{"step": step, "epoch": step // 2, "a": 1.0} for step in range(4)]
    assert default_axis([make_data(tmp_path, rows).curves]) == "step"


def test_summary_reads_log_of_many_polls_whole(tmp_path: Path) -> None:
    rows = 100_000
    with (tmp_path / "metrics.csv").open("w") as log:
        log.write("step,loss\n")
        log.writelines(f"{step},0.{step:09}\n" for step in range(rows))
    [run] = find_runs(tmp_path).runs
    loss = read_whole(run).curves.values(["loss"])["loss"]
    assert (loss.count, loss.step, loss.low, loss.last) == (rows, rows - 1, 0, 0.000099999)


def test_summary_has_the_step_and_value_that_were_written_last(tmp_path: Path) -> None:
    data = make_data(tmp_path, [{"step": 5, "a": 1.0}, {"step": 7, "a": 2.0, "b": 0.5}, {"step": 9, "b": 3.0}])
    values = read_whole(data.run).curves.values(["a", "b"])
    assert {name: (part.count, part.step, part.last) for name, part in values.items()} == {
        "a": (2, 7, 2.0), "b": (2, 9, 3.0),
    }  # fmt: skip
