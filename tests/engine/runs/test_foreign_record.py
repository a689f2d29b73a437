"""Runs of other programs as rows: filter, order and columns by their own parameters and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.report.foreign_run import read_run
from engine.runs.comparison import compare_runs
from engine.runs.fields import Names, find_field, names_of
from engine.runs.foreign_record import known_keys, make_foreign_row, metric_keys, with_metrics
from engine.runs.query import parse_query
from engine.runs.run_record import NO_RECORD
from engine.runs.run_row import RunRow
from engine.runs.run_view import run_columns
from engine.watch.activity import Activity
from engine.watch.folders import RunFinder, find_runs
from engine.watch.run_list import Figures, ForeignRunList, ListedRun
from support.messages import raises_problem

PARAMETERS = ({"lr": 0.1, "model.name": "vit", "seed": 1}, {"lr": 0.01, "model.name": "resnet", "seed": 1})


@pytest.fixture
def rows(tmp_path: Path) -> list[RunRow]:
    """Two runs: `a` is growing and has the larger learning rate and losses, and other names for its metrics."""
    made = []
    logged = (("val/loss", "val_acc"), ("eval_loss", "eval_accuracy"))
    for name, parameters, loss, logged_names in zip("ab", PARAMETERS, (0.5, 0.25), logged, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n1,0.5\n")
        (run,) = find_runs(tmp_path / name).runs
        metrics = {"train/loss": Figures(7, loss, loss / 2, 1.0), "acc": Figures(7, None, 0.1, 0.9)}
        metrics[logged_names[0]] = Figures(7, loss, loss / 2, 1.0)
        metrics[logged_names[1]] = Figures(7, 1 - loss, 0.1, 1 - loss / 4)
        state = Activity.GROWING if name == "a" else Activity.QUIET
        made.append(make_foreign_row(ListedRun(run, state, 1e9, metrics, parameters, is_read=True)))
    return made


def found(rows: list[RunRow], text: str) -> list[str]:
    query = parse_query(text, names_of(rows, is_foreign=True))
    return [row.name for row in query.filter(rows)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lr>0.05", ["a"]),
        ("learning_rate>0.05", ["a"]),
        ("model.name=resnet", ["b"]),
        ("train/loss<0.3", ["b"]),
        ("train_loss<0.3", ["b"]),
        ("val_loss<0.6", ["a", "b"]),
        ("best_val_loss<0.2", ["b"]),
        ("val_accuracy>0.7", ["b"]),
        ("best_val_accuracy>0.9", ["b"]),
        ("val/loss<0.6", ["a"]),
        ("eval_accuracy>0.7", ["b"]),
        ("best_eval_loss<0.2", ["b"]),
        ("metrics.acc<1", []),
        ("metrics.val_acc<0.6", []),
        ("best_train/loss<0.2", ["b"]),
        ("state=growing", ["a"]),
        ("growing", ["a"]),
        ("lr>0.05 -state=quiet", ["a"]),
        ("format=csv step>=7", ["a", "b"]),
        ("age>1d", ["a", "b"]),
    ],
)
def test_query_filters_by_parameters_metrics_and_state(rows: list[RunRow], text: str, names: list[str]) -> None:
    assert found(rows, text) == names


@pytest.mark.parametrize(("text", "code"), [("name.x=1", "unknown-key"), ("state=running", "unknown-value")])
def test_query_refuses_what_these_runs_do_not_have(rows: list[RunRow], text: str, code: str) -> None:
    with raises_problem(code):
        found(rows, text)


def test_last_part_of_several_names_is_ambiguous() -> None:
    with raises_problem("ambiguous-name"):
        find_field("lr", Names((), ("optimizer.lr", "scheduler.lr"), is_foreign=True))
    assert find_field("depth", Names((), ("model.depth",), is_foreign=True)).name == "model.depth"


def test_default_columns_are_losses_and_parameters_that_differ(rows: list[RunRow]) -> None:
    columns = run_columns(rows, is_foreign=True)
    assert columns[:7] == ("state", "age", "step", "val_loss", "val_accuracy", "train_loss", "metrics.acc")
    assert columns[7:] == ("lr", "model.name", "format")


def test_list_and_comparison_have_the_same_values_labels_and_directions(tmp_path: Path) -> None:
    logged = {"val/loss": 0.5, "val_acc": 0.75, "lr-Adam": 0.1, "top1": 70.0, "epoch": 2.0}
    rows = [{"step": step} | {name: value / step for name, value in logged.items()} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    followed = ForeignRunList(RunFinder(tmp_path).search)
    followed.poll(5.0)
    [listed] = followed.runs
    row, compared = make_foreign_row(listed), read_run(listed.run)
    for metric in compare_runs([compared]).shown_metrics:
        field = find_field(metric.key, Names(is_foreign=True))
        assert (field.value(row), field.label) == (metric.of_run(compared.record), metric.label)
        assert field.metric is not None and field.metric.better is metric.better
    assert set(known_keys([row])) == {"val_loss", "val_accuracy", "metrics.lr-Adam", "metrics.top1"}


def test_accuracy_in_percent_has_the_name_of_the_log() -> None:
    values = {"val_acc": Figures(1, 71.0, 70.0, 71.0)}
    keys = metric_keys(values)
    record = with_metrics(NO_RECORD, values)
    assert "val_accuracy" not in record.values and keys == {"val_acc": "metrics.val_acc"}
    assert record.values["metrics.val_acc"] == 71.0


def test_row_of_gputrain_has_no_field_of_other_programs(rows: list[RunRow]) -> None:
    assert "format" not in rows[0].to_json()
