"""Metrics of foreign runs share a chart if their names differ in what they were measured on."""

from __future__ import annotations

import pytest

from engine.report.charts import Kind, curve_labels, foreign_charts, group_metrics, kind_of
from engine.runs.curves import Curves
from engine.watch.points import Point, Points
from engine.watch.reading import Reading

LAYOUTS = {
    "ultralytics": (
        "epoch time train/box_loss train/cls_loss metrics/precision(B) metrics/mAP50(B) val/box_loss val/cls_loss "
        "lr/pg0",
        {
            "box_loss": {"train/box_loss": "train", "val/box_loss": "val"},
            "metrics/mAP50(B)": {"metrics/mAP50(B)": ""},
            "lr/pg0": {"lr/pg0": ""},
            "cls_loss": {"train/cls_loss": "train", "val/cls_loss": "val"},
            "metrics/precision(B)": {"metrics/precision(B)": ""},
            "epoch": {"epoch": ""},
            "time": {"time": ""},
        },
    ),
    "Keras": (
        "accuracy learning_rate loss val_accuracy val_loss",
        {
            "loss": {"loss": "train", "val_loss": "val"},
            "accuracy": {"accuracy": "train", "val_accuracy": "val"},
            "learning_rate": {"learning_rate": ""},
        },
    ),
    "Lightning": (
        "lr-Adam train_loss_step val_acc val_loss train_loss_epoch",
        {
            "loss": {"train_loss_step": "train step", "train_loss_epoch": "train epoch", "val_loss": "val"},
            "acc": {"val_acc": "val"},
            "lr-Adam": {"lr-Adam": ""},
        },
    ),
    "Hugging Face": (
        "loss grad_norm learning_rate eval_loss eval_runtime eval_samples_per_second",
        {
            "loss": {"loss": "train", "eval_loss": "val"},
            "learning_rate": {"learning_rate": ""},
            "grad_norm": {"grad_norm": ""},
            "runtime": {"eval_runtime": "val"},
            "samples_per_second": {"eval_samples_per_second": "val"},
        },
    ),
    "timm": (
        "train_loss eval_loss eval_top1 lr",
        {
            "loss": {"train_loss": "train", "eval_loss": "val"},
            "top1": {"eval_top1": "val"},
            "lr": {"lr": ""},
        },
    ),
    "names with the source last": (
        "Loss/train Loss/test",
        {"Loss": {"Loss/train": "train", "Loss/test": "test"}},
    ),
    "names that are only a source": ("train val", {"train": {"train": ""}, "val": {"val": ""}}),
    "two metrics of one source": (
        "train/loss train_loss",
        {"loss": {"train/loss": "train/loss", "train_loss": "train_loss"}},
    ),
    "sources within words": (
        "latest_loss evaluator/loss",
        {"evaluator/loss": {"evaluator/loss": ""}, "latest_loss": {"latest_loss": ""}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("names, charts", LAYOUTS.values(), ids=LAYOUTS)
def test_metrics_of_trainer_share_charts(names: str, charts: dict[str, dict[str, str]]) -> None:
    grouped = {chart.title: curve_labels(chart) for chart in group_metrics(names.split())}
    assert grouped == charts
    assert list(grouped) == list(charts)


@pytest.mark.parametrize(
    "title, kind",
    {"loss": Kind.LOSS, "mae": Kind.LOSS, "top5": Kind.ACCURACY, "learning_rate": Kind.LR, "grad_norm": Kind.OTHER,
     "samples_per_second": Kind.PROGRESS, "global_step": Kind.PROGRESS}.items(),
)  # fmt: skip
def test_kind_follows_the_words_of_a_title(title: str, kind: Kind) -> None:
    assert kind_of(title) is kind


def test_accuracy_has_no_log_scale() -> None:
    assert [(chart.title, chart.log) for chart in group_metrics(["loss", "acc"])] == [("loss", True), ("acc", False)]


def test_loss_of_epochs_shares_no_chart_with_one_of_iterations() -> None:
    curves = Curves()
    points = [Point("train/loss", step, 1.0) for step in range(900)]
    curves.add([Reading(Points([*points, *(Point("val/loss", epoch, 2.0) for epoch in range(5))]))])
    assert [(chart.title, list(chart.metrics)) for chart in foreign_charts(curves)] == [
        ("loss", ["train/loss"]), ("val/loss", ["val/loss"]),
    ]  # fmt: skip
