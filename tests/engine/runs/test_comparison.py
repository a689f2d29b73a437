"""Comparisons of runs: figures from journals, seed groups, best values and differences from a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.runs.comparison import MAX_RUNS, Comparison, compare_runs, spread
from engine.runs.events import Event, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.metrics import METRICS, Better, format_metric
from engine.runs.run_row import RunRow, open_run
from support.messages import has_problem, raises_problem
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_config

END = RunFinished(time=30.0, state="finished")


def make_run(root: Path, name: str, *events: Event, **config: dict[str, Any]) -> RunFolder:
    folder = make_run_folder(root, name, *(events or (make_run_started(), make_epoch(1, 0.5), END)))
    write_config(folder, config)
    return folder


def compare(*folders: RunFolder) -> Comparison:
    return compare_runs([open_run(folder) for folder in folders])


def test_comparison_lists_the_keys_that_differ_and_nothing_else(tmp_path: Path) -> None:
    comparison = compare(
        make_run(tmp_path, "a", run={"seed": 1}, optim={"lr": 0.1}), make_run(tmp_path, "b", optim={"lr": 0.2})
    )
    assert {part.key: part.values for part in comparison.differences} == {"run.seed": (1, 0), "optim.lr": (0.1, 0.2)}
    assert comparison.seed_groups == ()


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"s{seed}", run={"seed": seed, "name": f"s{seed}"}) for seed in range(3)]
    other = make_run(tmp_path, "other", optim={"lr": 0.2})
    comparison = compare(runs[0], other, *runs[1:])
    assert comparison.seed_groups == ((0, 2, 3),)
    assert comparison.columns(grouped=True) == [(0, 2, 3), (1,)]
    assert comparison.columns(grouped=False) == [(0,), (1,), (2,), (3,)]


def test_seeds_with_another_global_batch_are_no_group(tmp_path: Path) -> None:
    wide = replace(make_run_started(), global_batch=128)
    runs = [make_run(tmp_path, "a", run={"seed": 1}), make_run(tmp_path, "b", wide, run={"seed": 2})]
    assert compare(*runs).seed_groups == ()


def test_group_figure_is_mean_and_sample_deviation(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, f"s{seed}", make_run_started(), make_epoch(1, accuracy), END, run={"seed": seed})
        for seed, accuracy in enumerate((0.7, 0.8, 0.9))
    ]
    comparison = compare(*runs)
    value = comparison.value(comparison.columns(grouped=True)[0], METRICS["best_val_accuracy"])
    assert value is not None
    assert (value.mean, value.deviation, value.count) == (pytest.approx(0.8), pytest.approx(0.1), 3)


def test_spread_leaves_out_unknown_values() -> None:
    assert spread([None, 2.0]) == spread([2.0])
    assert spread([None, None]) is None


def test_best_columns_of_high_and_low_figures(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, str(number), make_run_started(), make_epoch(number, accuracy), END)
        for number, accuracy in ((1, 0.9), (2, 0.9), (3, 0.5))
    ]
    comparison = compare(*runs)
    columns = comparison.columns(grouped=False)
    assert comparison.best_columns(columns, METRICS["best_val_accuracy"]) == {0, 1}
    assert comparison.best_columns(columns, METRICS["best_val_loss"]) == {2}
    assert comparison.best_columns(columns, METRICS["ranks"]) == set()
    assert comparison.best_columns(columns[:2], METRICS["best_val_accuracy"]) == set()


def test_best_seconds_are_of_finished_runs(tmp_path: Path) -> None:
    short = [make_run_started(), make_epoch(1, 0.5), RunFinished(time=2.0, state="failed")]
    runs = [make_run(tmp_path, "failed", *short), make_run(tmp_path, "a")]
    runs += [make_run(tmp_path, "b", make_run_started(), make_epoch(1), replace(END, time=40.0))]
    comparison = compare(*runs)
    assert comparison.best_columns(comparison.columns(grouped=False), METRICS["seconds"]) == {1}


@pytest.mark.parametrize(
    ("change", "noted"),
    [({"dataset": "fake"}, True), ({"path": "/elsewhere"}, False), ({"dataset": "folder", "path": "/elsewhere"}, True)],
)
def test_comparison_notes_different_datasets(tmp_path: Path, change: dict[str, Any], noted: bool) -> None:
    comparison = compare(make_run(tmp_path, "a"), make_run(tmp_path, "b", data=change))
    assert has_problem(comparison.notes, "not-comparable") is noted


def test_comparison_notes_datasets_of_another_size(tmp_path: Path) -> None:
    larger = make_run(tmp_path, "b", replace(make_run_started(), train_images=9999))
    assert has_problem(compare(make_run(tmp_path, "a"), larger).notes, "not-comparable")


def test_comparison_notes_config_that_neither_record_nor_file_has(tmp_path: Path) -> None:
    broken = make_run(tmp_path, "broken")
    broken.config.write_text("{")
    broken.summary.unlink()
    comparison = compare(make_run(tmp_path, "a", optim={"lr": 0.5}), broken)
    assert has_problem(comparison.notes, "damaged", "broken", "config.yaml")
    assert comparison.differences == ()


def test_comparison_as_json_has_differences_from_the_baseline(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, name, make_run_started(), make_epoch(1, accuracy), END, run={"seed": seed})
        for seed, (name, accuracy) in enumerate((("a", 0.5), ("b", 0.75)))
    ]
    values = json.loads(json.dumps(compare(*runs).to_dict(0), allow_nan=False))
    assert values["baseline"] == "a"
    assert values["config"] == {"run.seed": [0, 1]}
    assert values["runs"][1]["difference"]["best_val_accuracy"] == 0.25
    assert values["runs"][1]["figures"]["best_epoch"] == 1
    assert values["best"]["best_val_accuracy"] == [1]
    assert values["seed_groups"][0]["runs"] == [0, 1]
    assert values["seed_groups"][0]["figures"]["best_val_accuracy"]["mean"] == 0.625


@pytest.mark.parametrize(("count", "code"), [(0, "missing-value"), (MAX_RUNS + 1, "too-many")])
def test_compare_runs_limits_their_number(count: int, code: str) -> None:
    run = RunRow("a", "/a", "finished")
    with raises_problem(code, "compare"):
        compare_runs([run] * count)


def test_comparison_shows_own_metrics_with_the_best_in_their_direction(tmp_path: Path) -> None:
    runs = []
    for name, gaps in (("a", (0.1, 0.4)), ("b", (0.2, 0.3))):
        epochs = [replace(make_epoch(epoch, 0.5), metrics={"gap": gap}) for epoch, gap in enumerate(gaps, 1)]
        runs.append(open_run(make_run(tmp_path, name, make_run_started(), *epochs, END)))
    for directions, best, values in (({}, 0, [0.4, 0.3]), ({"gap": Better.LOW}, 0, [0.1, 0.2])):
        comparison = compare_runs(runs, directions).to_dict()
        assert [run["figures"]["best_metrics.gap"] for run in comparison["runs"]] == values
        assert comparison["best"]["best_metrics.gap"] == [best]
    assert [metric.key for metric in compare_runs(runs).shown_metrics][-2:] == ["best_metrics.gap", "metrics.gap"]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *(("val_loss", 0.5, "0.5000"), ("val_loss", 0.0, "0.0000"), ("val_loss", 2e-5, "2e-5")),
        *(("val_loss", 1e6, "1e6"), ("mfu", 0.4321, "0.4321"), ("seconds", 4.56, "4.6s"), ("seconds", 75.0, "1m15s")),
        *(("rate_now", 6438.2, "6,438"), ("parameters", 11_000_000, "11,000,000"), ("epochs", 2.5, "2.5")),
        ("grad_norm", 12.3456, "12.35"),
    ],
)
def test_format_metric_shows_the_digits_that_people_compare(key: str, value: float, text: str) -> None:
    assert format_metric(METRICS[key], value) == text


def test_metric_of_the_best_epoch_comes_first_if_all_runs_choose_by_it(tmp_path: Path) -> None:
    def run(name: str, monitor: str) -> RunFolder:
        started = replace(make_run_started(), monitor=monitor)
        return make_run(tmp_path, name, started, replace(make_epoch(1, 0.5), metrics={"macro_recall": 0.7}), END)

    by_loss = compare(run("a", "loss"), run("b", "loss"))
    assert by_loss.shown_metrics[0].key == "best_val_loss"
    by_recall = compare(run("e", "macro_recall"), run("f", "macro_recall"))
    assert [metric.key for metric in by_recall.metrics if metric.label == "best macro_recall"] == ["best"]
    mixed = compare(run("c", "loss"), run("d", "accuracy"))
    assert mixed.monitor is None and has_problem(mixed.notes, "not-comparable", "", "lowest val loss, best val acc")
