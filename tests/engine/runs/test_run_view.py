"""What a filter, an order and folded sweeps show of the runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.runs.query import Query
from engine.runs.run_row import RunRow
from engine.runs.run_view import OwnMetrics, RunView, ViewRequest, make_view, query_of
from engine.runs.sort_order import SortOrder
from engine.runs.trials import fold_trials
from support.runs.factories import make_row


def row(name: str, **values: Any) -> RunRow:
    return make_row(name, **({"state": "finished", "val_loss": 0.2398} | values))


def view_of(rows: list[RunRow], text: str = "", own: OwnMetrics = (), **options: Any) -> RunView:
    query = query_of(text, own)
    assert isinstance(query, Query), query
    return make_view(ViewRequest(rows, text, own=own, **options), query)


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


def test_view_groups_trials_once_for_all_lines() -> None:
    class CountedRows(list[RunRow]):
        reads = 0

        def __iter__(self) -> Iterator[RunRow]:
            self.reads += 1
            return super().__iter__()

    rows = CountedRows(row(f"{sweep}-00{number}", sweep=sweep) for sweep in "abc" for number in range(2))
    shown = fold_trials(rows)
    view, reads = RunView(ViewRequest(rows), rows, shown), rows.reads
    assert [[trial.name for trial in view.runs_of(each)] for each in shown] == [
        [f"{sweep}-000", f"{sweep}-001"] for sweep in "abc"
    ]
    assert rows.reads == reads + 1


@pytest.mark.parametrize("text", ["val_accuracy>x", "nosuchkey=1", "best>=", "state=unknown"])
def test_query_of_mistake_is_one_line(text: str) -> None:
    problem = query_of(text)
    assert isinstance(problem, str) and problem and "\n" not in problem


def test_view_of_typed_query_equals_view_of_whole_query() -> None:
    rows = [
        row(f"{name}-{number}", config={"optim.lr": number / 10}, archived=number == 3, tags=("night",) * (number % 2))
        for name in ("cnn", "resnet")
        for number in range(6)
    ]
    typed = "lr>0.1 resnet archived=no night"
    texts = [typed[:end] for end in range(len(typed) + 1)]
    before = None
    for text in [*texts, *reversed(texts), "night lr>0.1", "resnet lr>0.1", ""]:
        if isinstance(query := query_of(text), Query):
            for archived in (False, True, False):
                request = ViewRequest(rows, text, archived=archived)
                before = make_view(request, query, before)
                assert before == make_view(request, query)
