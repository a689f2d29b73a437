"""Runs of other programs as rows: filter, order and columns by their own parameters and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.foreign.activity import Activity
from engine.foreign.folders import find_runs
from engine.foreign.run_list import Figures, ListedRun
from engine.runs.fields import find_field
from engine.runs.foreign_rows import default_columns, make_foreign_row, parameter_names
from engine.runs.metrics import own_metrics
from engine.runs.query import SortOrder, parse_query
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError

PARAMETERS = ({"lr": 0.1, "model.name": "vit", "seed": 1}, {"lr": 0.01, "model.name": "resnet", "seed": 1})


@pytest.fixture
def rows(tmp_path: Path) -> list[RunRow]:
    """Two runs: `a` is growing and has the larger learning rate and loss."""
    made = []
    for name, parameters, loss in zip("ab", PARAMETERS, (0.5, 0.25), strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n1,0.5\n")
        (run,) = find_runs(tmp_path / name).runs
        metrics = {"train/loss": Figures(7, loss, loss / 2, 1.0), "acc": Figures(7, None, 0.1, 0.9)}
        state = Activity.GROWING if name == "a" else Activity.QUIET
        made.append(make_foreign_row(ListedRun(run, state, 1e9, metrics, parameters, is_read=True)))
    return made


def found(rows: list[RunRow], text: str) -> list[str]:
    query = parse_query(text, own_metrics(row.record for row in rows), parameter_names(rows))
    return [row.name for row in query.filter(rows)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lr>0.05", ["a"]),
        ("learning_rate>0.05", ["a"]),
        ("model.name=resnet", ["b"]),
        ("train/loss<0.3", ["b"]),
        ("loss<0.3", ["b"]),
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
    with pytest.raises(UsageError) as caught:
        found(rows, text)
    assert caught.value.problems[0].code == code


def test_last_part_of_several_names_is_ambiguous() -> None:
    with pytest.raises(UsageError) as caught:
        find_field("lr", {}, ("optimizer.lr", "scheduler.lr"))
    assert caught.value.problems[0].code == "ambiguous-name"
    assert find_field("depth", {}, ("model.depth",)).name == "model.depth"


def test_order_by_a_parameter_and_by_a_metric(rows: list[RunRow]) -> None:
    own, names = own_metrics(row.record for row in rows), parameter_names(rows)
    by_lr = SortOrder(find_field("lr", own, names))
    by_loss = SortOrder(find_field("train/loss", own, names))
    assert [row.name for row in by_lr.sort(rows)] == ["b", "a"]
    assert [row.name for row in by_loss.sort(rows)] == ["b", "a"]


def test_default_columns_are_losses_and_parameters_that_differ(rows: list[RunRow]) -> None:
    columns = default_columns(rows)
    assert columns[:5] == ("state", "age", "step", "metrics.train/loss", "metrics.acc")
    assert columns[5:] == ("lr", "model.name", "format")


def test_row_of_gputrain_has_no_field_of_other_programs(rows: list[RunRow]) -> None:
    assert "format" not in rows[0].to_dict()
