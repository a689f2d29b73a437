"""What a filter, an order and folded sweeps show of the runs, and the columns to choose from."""

from __future__ import annotations

from typing import Any

import pytest

from engine.runs.query import Query
from engine.runs.run_row import RunRow
from engine.runs.run_view import RunView, SortOrder, ViewRequest, known_columns, make_view, query_of
from support.runs.factories import make_row


def row(name: str, **values: Any) -> RunRow:
    return make_row(name, **({"state": "finished", "val_loss": 0.2398} | values))


def view_of(rows: list[RunRow], text: str = "", **options: Any) -> RunView:
    query = query_of(text)
    assert isinstance(query, Query), query
    return make_view(ViewRequest(rows, text, **options), query)


def names(view: RunView) -> list[str]:
    return [shown.name for shown in view.shown]


def test_view_hides_archived_runs_unless_asked_for() -> None:
    rows = [row("a"), row("b", archived=True)]
    assert names(view_of(rows)) == ["a"] and view_of(rows).count_text == "1 run, 1 archived"
    assert names(view_of(rows, archived=True)) == ["a", "b"]
    assert names(view_of(rows, "archived=yes")) == ["b"]


def test_view_sorts_and_counts_matches() -> None:
    rows = [row("a", val_loss=0.3), row("b", val_loss=0.1), row("c", val_loss=None), row("d", state="failed")]
    view = view_of(rows, "finished", order=SortOrder.parse("val_loss"))
    assert names(view) == ["b", "a", "c"]
    assert view.count_text == "3 of 4 match 'finished'" and view.keys == ["/runs/b", "/runs/a", "/runs/c"]


@pytest.mark.parametrize("text", ["val_accuracy>x", "nosuchkey=1", "best>=", "state=odd"])
def test_query_of_mistake_is_one_line(text: str) -> None:
    problem = query_of(text)
    assert isinstance(problem, str) and problem and "\n" not in problem


def test_known_columns_omit_names_of_other_versions() -> None:
    known = known_columns(["lr", "no.such.key", "optim.lr", "state"])
    assert [field.name for field in known] == ["optim.lr", "state"]
