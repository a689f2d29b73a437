"""Figures for papers: formats, labels, seed groups, gaps, and what is refused."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from engine.report.plot import (
    MARK,
    column_labels,
    file_format,
    find_panel,
    make_plot,
    write_output,
)
from engine.runs.comparison import compare_runs
from engine.runs.metrics import Better
from engine.runs.run_row import open_run
from support.messages import raises_problem
from support.replace import replace
from support.runs.compared_runs import make_compared_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_run_record


def test_plot_is_the_same_for_the_same_runs_in_each_format(tmp_path: Path) -> None:
    run = make_compared_run(tmp_path, "a$x$_b")
    for kind, beginning in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        figure = make_plot([run], kind, metrics=["accuracy"])
        assert figure.startswith(beginning) and figure == make_plot([run], kind, metrics=["accuracy"])
    assert Image.open(io.BytesIO(figure)).size[0] == 2025


def test_plot_labels_runs_by_name_and_keys_that_change_the_result(tmp_path: Path) -> None:
    folders = [make_compared_run(tmp_path, f"run-{seed}", seed=seed, lr=0.001246511786) for seed in range(2)]
    folders.append(make_compared_run(tmp_path, "_fast", lr=0.4))
    for folder, value in zip(folders, ({}, {"workers": 2}, {"workers": 2, "batch_size": 8}), strict=True):
        folder.config.write_text(f"{folder.config.read_text()}data: {value}\n")
        write_run_record(folder)
    comparison = compare_runs([open_run(folder) for folder in folders])
    assert column_labels(comparison, comparison.columns(grouped=True), 99) == [
        "run-0 (2 seeds): batch_size 64, lr 0.00125",
        " _fast: batch_size 8, lr 0.4",
    ]
    separate = comparison.columns(grouped=False)
    assert column_labels(comparison, separate, 20)[0] == "run-0: seed 0, batc…"
    text = make_plot(folders, "svg", metrics=("loss",), log=True).decode()
    shown = svg_texts(text)
    assert {"val loss", "Epoch", "run-0 (2 seeds): batch_size 64, lr 0.00125", " _fast: batch_size 8, lr 0.4"} <= set(
        shown
    )
    assert not any("$" in label for label in shown)


def svg_texts(figure: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", figure)


def test_plot_of_curves_with_gaps_and_nonpositive_values(tmp_path: Path) -> None:
    epochs = [replace(make_epoch(number), val_loss=loss) for number, loss in enumerate([1.0, math.nan, -1.0, 2.0], 1)]
    run = make_run_folder(tmp_path, "a", make_run_started(), *epochs)
    assert b"nan" not in make_plot([run], "svg", metrics=("val_loss",), log=True).lower()


def test_plot_refuses_metric_without_value(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1))
    with raises_problem("not-recorded", "--metric", "ema_val_loss"):
        make_plot([run], "svg", metrics=("ema_val_loss",))


def test_plot_shows_the_users_own_metrics_by_name(tmp_path: Path) -> None:
    epochs = [replace(make_epoch(number), metrics={"val/f$1": number / 4, "lr": 0.5}) for number in (1, 2)]
    run = make_run_folder(tmp_path, "a", make_run_started(), *epochs)
    for name in ("val/f$1", "metrics.val/f$1", '"val/f$1"', 'metrics."val/f$1"'):
        figure = make_plot([run], "svg", metrics=(name, "loss"), log=True)
        # A log scale has other labels: 0.3, not 0.30.
        assert svg_texts(figure.decode())[:11] == [
            "1",
            "2",
            "Epoch",
            "0.25",
            "0.30",
            "0.35",
            "0.40",
            "0.45",
            "0.50",
            "val/f$1",
            "1",
        ]
    figure = make_plot([run], "svg", metrics=("val/f$1", "loss"), log=True, directions={"val/f$1": Better.LOW})
    assert "0.30" not in svg_texts(figure.decode())
    assert find_panel("lr", ["lr"]) == "lr" and find_panel("metrics.lr", ["lr"]) == "metrics.lr"
    with raises_problem("unknown-value", "--metric", "val/f1", "val/f$1"):
        make_plot([run], "svg", metrics=("val/f1",))


def test_plot_arguments() -> None:
    assert (find_panel("Val-Top5"), find_panel("throughput")) == ("val_top5", "images_per_second")
    aliases = {"learning-rate": "lr", "optim.lr": "lr", "top5": "val_top5", "acc": "best_val_accuracy"}
    assert {name: find_panel(name) for name in aliases} == aliases
    assert file_format(Path("a.PDF")) == "pdf"


@pytest.mark.parametrize(
    ("parse", "text", "code", "location", "shown"),
    [
        (find_panel, "f1", "unknown-value", "--metric", "f1"),
        (find_panel, "accurcy", "unknown-value", "--metric", "did you mean accuracy?"),
        (find_panel, "lerning-rate", "unknown-value", "--metric", "did you mean learning_rate?"),
        (file_format, Path("a.jpg"), "wrong-format", "-o", Path("a.jpg")),
    ],
)
def test_plot_refuses_unknown_argument(
    parse: Callable[[object], object], text: object, code: str, location: str, shown: object
) -> None:
    with raises_problem(code, location, shown):
        parse(text)


def test_output_replaces_earlier_reports_only(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_output(path, MARK.encode(), force=False)
    write_output(path, b"own notes on gputrain report", force=False)
    with raises_problem("name-in-use", "--output", str(path), "--force"):
        write_output(path, b"", force=False)
    write_output(path, b"forced", force=True)
    assert path.read_bytes() == b"forced"


def test_output_names_path_that_cannot_be_written(tmp_path: Path) -> None:
    with raises_problem("not-a-file", "--output", tmp_path / "report.html"):
        write_output(tmp_path, b"", force=True)
    with raises_problem("not-writable", None, "File name too long"):
        write_output(tmp_path / f"{'a' * 300}.html", b"", force=False)
