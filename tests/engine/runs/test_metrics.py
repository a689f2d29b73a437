"""The registry of metrics: a row that a test adds appears wherever metrics are shown."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.jobs.notify.message import make_message
from engine.report.page import make_page
from engine.report.sync.rows import read_rows
from engine.report.table import plain_lines
from engine.runs.folder import RunFolder
from engine.runs.metrics import METRICS, Better, Metric, Taken, Unit
from support.replace import replace
from support.runs.curves import curves_of
from support.runs.event_factories import make_epoch, make_run_started, make_step
from support.runs.factories import make_run_folder, row_of
from tui.screens.tables.runs import listed_columns

# Losses are multiples of 1/8, so that their differences are exact.
EPOCHS = [replace(make_epoch(number), train_loss=0.5 / number, val_loss=0.5 / number + 0.125) for number in (1, 2)]


def difference(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else high - low


@pytest.fixture
def loss_gap(monkeypatch: pytest.MonkeyPatch) -> Metric:
    """A row that gputrain does not have."""
    metric = Metric(
        key="loss_gap",
        label="loss gap",
        description="validation minus training loss",
        unit=Unit.SCORE,
        better=Better.LOW,
        taken=Taken.LAST,
        epoch=lambda epoch: difference(epoch.train_loss, epoch.val_loss),
    )
    monkeypatch.setitem(METRICS, metric.key, metric)
    return metric


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run_folder(tmp_path, "a", make_run_started(), *EPOCHS)


def test_metric_row_appears_in_rows_that_sync_sends(loss_gap: Metric) -> None:
    rows = [*read_rows((make_run_started(), make_step(10), EPOCHS[0]), (), ended=True)]
    assert rows[-1].metrics[f"epoch/{loss_gap.key}"] == 0.125


def test_metric_row_has_curve(loss_gap: Metric) -> None:
    curves = curves_of(make_run_started(), *EPOCHS)
    assert curves.over(loss_gap.key, "epoch").points.y.tolist() == [0.125, 0.125]


def test_label_of_registry_appears_in_report_list_and_message(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("val_top5", "best_val_accuracy"):
        monkeypatch.setitem(METRICS, key, dataclasses.replace(METRICS[key], label=f"label of {key}"))
    text = " ".join(re.sub("<[^>]*>", " ", make_page([run])).split())
    assert "label of val_top5 0.5000" in text
    row = row_of(run)
    assert "label of best_val_accuracy" in plain_lines(listed_columns([row]), [row])[0]
    message = make_message("stopped", "", "h", run.path, row.record, resumable=False)
    assert ", label of best_val_accuracy 0.5000" in message.body
