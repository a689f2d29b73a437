"""A summary of a run has what its logs hold, whatever was written twice."""

from __future__ import annotations

from pathlib import Path

from engine.foreign.folders import find_runs
from engine.foreign.summary import MetricValues, summarize


def test_drop_from_forgets_steps_in_any_order() -> None:
    metric = MetricValues()
    for step in (1, 2, 5, 3, 4):
        metric.steps.append(step)
        metric.values.append(step / 10)
    metric.drop_from(4)
    assert (list(metric.steps), list(metric.values)) == ([1, 2, 3], [0.1, 0.2, 0.3])
    metric.drop_from(float("-inf"))
    assert not metric.steps and not metric.values


def test_summarize_reads_log_of_many_polls_whole(tmp_path: Path) -> None:
    rows = 100_000
    with (tmp_path / "metrics.csv").open("w") as log:
        log.write("step,loss\n")
        log.writelines(f"{step},0.123456789\n" for step in range(rows))
    [run] = find_runs(tmp_path).runs
    summary = summarize(run)
    assert (len(summary.metrics["loss"].steps), summary.last_step) == (rows, rows - 1)
