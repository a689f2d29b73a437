"""What a filter, an order and folded sweeps show of the runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.runs.metrics import Better
from engine.runs.query import Query
from engine.runs.run_row import RunRow
from engine.runs.run_view import OwnMetrics, OwnMetricsFinder, RunView, ViewRequest, make_view, query_of
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


def test_view_does_not_apply_key_that_is_being_typed() -> None:
    rows = [row("a"), row("b", state="failed")]
    view = view_of(rows, "failed optim.na")
    assert names(view) == ["b"] and view.typed_key == "optim.na"
    assert names(view_of(rows, "failed zzz")) == []
    rows.append(row("c", metrics={"eval/F1": 0.5}))
    own = OwnMetricsFinder().find(rows)
    assert names(view_of(rows, "finished eval/f", own)) == ["a", "c"]
    assert names(view_of(rows, "finished eval/F1>0.4", own)) == ["c"]


@pytest.mark.parametrize("text", ["val_accuracy>x", "nosuchkey=1", "best>=", "state=unknown"])
def test_query_of_mistake_is_one_line(text: str) -> None:
    problem = query_of(text)
    assert isinstance(problem, str) and problem and "\n" not in problem


def test_own_metrics_are_found_again_if_rows_or_directions_change() -> None:
    finder, rows = OwnMetricsFinder(), [row("a", metrics={"gap": 0.5})]
    assert finder.find(rows) == (("gap", Better.HIGH),) and finder.find(rows) is finder.find(rows)
    finder.directions = {"gap": Better.LOW}
    assert finder.find(rows) == (("gap", Better.LOW),)
    assert finder.find([*rows, row("b", metrics={"f1": 0.5})])[1:] == (("f1", Better.HIGH),)


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


def test_view_applies_only_words_that_were_not_typed_before() -> None:
    rows, applied = [row(str(number)) for number in range(10)], list[str]()

    def note_first(run: RunRow) -> bool:
        applied.append(run.name)
        return run.name < "2"

    first, both = query_of("finished"), query_of("finished base")
    assert isinstance(first, Query) and isinstance(both, Query)
    view = make_view(ViewRequest(rows, first.text), replace(first, predicates=(note_first,)))
    applied.clear()
    view = make_view(ViewRequest(rows, both.text), replace(both, predicates=(note_first, lambda _: True)), view)
    assert applied == [] and names(view) == ["0", "1"]
    make_view(ViewRequest(list(rows), both.text), replace(both, predicates=(note_first, lambda _: True)), view)
    assert len(applied) == 10
