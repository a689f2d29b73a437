"""The table of charts: its keys, its titles, and the charts of metrics that are not in it."""

from __future__ import annotations

import pytest

from engine.report.charts import CHARTS, Chart, find_chart
from engine.runs.journal_source import STEP_METRICS
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
def test_chart_draws_metrics_that_have_curves(chart: Chart) -> None:
    assert all(key in STEP_METRICS or METRICS[key].epoch is not None for key in chart.metrics)


def test_charts_smooth_curves_that_have_a_value_for_each_step() -> None:
    smoothed = {key for chart in CHARTS.values() for key in chart.metrics if chart.is_smoothed(key)}
    assert smoothed == {"train_loss", "grad_norm"}


def test_own_metric_has_chart_with_log_scale_unless_it_may_be_a_share() -> None:
    chart = find_chart(f"{METRIC_PREFIX}f1")
    assert (chart.title, chart.log) == ("f1", False)
    assert find_chart(chart.id, {"f1": Better.LOW}).log
