"""The table of runs as text: which columns fit, titles, cells, and what a filter shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.runs.fields import find_field
from engine.runs.metrics import METRICS, Better
from engine.runs.query import Query, SortOrder
from engine.runs.run_row import RunRow
from engine.runs.trials import fold_trials
from support.runs.factories import default_fields, make_row
from tui.text.run_columns import column_choices, known_columns
from tui.text.run_table import DEFAULT_COLUMNS, RunTable
from tui.text.run_view import OwnMetrics, OwnMetricsFinder, RunView, ViewRequest, make_view, query_of

VALUES = {
    "state": "finished", "epochs": 3, "total_epochs": 3, "best_val_accuracy": 0.9376, "val_loss": 0.2398,
    "seconds": 125.0, "global_batch": 512, "images_per_second": 6438.0, "tags": ("best", "paper"),
    "config": {"model.name": "resnet50", "optim.lr": 0.2, "data.dataset": "folder"},
}  # fmt: skip


def row(name: str, **values: Any) -> RunRow:
    return make_row(name, **(VALUES | values))


ROW = row("base")


def view_of(rows: list[RunRow], text: str = "", own: OwnMetrics = (), **options: Any) -> RunView:
    query = query_of(text, own)
    assert isinstance(query, Query), query
    return make_view(ViewRequest(rows, text, own=own, **options), query)


def names(view: RunView) -> list[str]:
    return [shown.name for shown in view.shown]


@pytest.mark.parametrize(
    ("width", "count"), [(12, 0), (24, 1), (76, 7), (116, 11), (156, len(DEFAULT_COLUMNS)), (300, len(DEFAULT_COLUMNS))]
)
def test_table_drops_columns_from_the_right(width: int, count: int) -> None:
    table = RunTable.fit([ROW], width, default_fields(), with_message=True)
    assert tuple(fitted.column.name for fitted in table.columns) == DEFAULT_COLUMNS[:count]
    assert table.header.cell_len <= width
    if not table.message_columns:
        assert table.line(ROW, marked=True).cell_len <= width


def test_table_formats_config_values_and_figures() -> None:
    fields = [find_field(name) for name in ("optim.lr", "optim.name", "duration", "tags", "val_loss", "mfu")]
    table = RunTable.fit([ROW], 120, fields)
    assert table.header.plain.split() == ["name", "lr", "optimizer", "duration", "tags", "val", "loss", "mfu"]
    assert table.line(ROW).plain.split() == ["○", "base", "0.2", "sgd", "2m05s", "best,paper", "0.2398", "–"]


def test_table_header_marks_sorted_column_and_direction() -> None:
    for reverse, sign in ((False, "▾"), (True, "▴")):
        order = SortOrder.parse("best_val_accuracy", reverse=reverse)
        assert f"best acc{sign}" in RunTable.fit([ROW], 120, default_fields(), order).header.plain


def test_table_escapes_text_of_others() -> None:
    odd = row("a", tags=("x\x1b[31m",), config={"data.dataset": "b\x07\u202e"})
    text = RunTable.fit([odd], 200, default_fields()).line(odd).plain
    assert text.isprintable() and "x\\x1b[31m" in text


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


def test_column_choices_name_values_and_list_differing_keys_first() -> None:
    rows = [row("a", config={"optim.lr": lr, "model.name": "cnn"}) for lr in (0.1, 0.2)]
    choices = column_choices(rows, ["state"])
    assert [choice.name for choice in choices[:2]] == ["state", "optim.lr"]
    assert choices[1].about == "0.1, 0.2"
    assert {"run.seed", "val_loss"} <= {choice.name for choice in choices}


def test_column_choices_name_own_metrics_and_labels_of_metrics() -> None:
    choices = column_choices([row("a", metrics={"val f1": 0.5})], [])
    about = {choice.name: choice.about for choice in choices}
    assert about["metrics.val f1"] == "val f1" and about["best_metrics.val f1"] == "best val f1"
    assert about["images_per_second"] == METRICS["images_per_second"].label


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


def test_known_columns_omit_names_of_other_versions() -> None:
    known = known_columns(["lr", "no.such.key", "optim.lr", "state"])
    assert [field.name for field in known] == ["optim.lr", "state"]


def test_column_choices_leave_out_keys_of_another_version() -> None:
    rows = [row("a", config={"optim.renamed": value, "optim.lr": value}) for value in (0.1, 0.2)]
    names = {choice.name for choice in column_choices(rows, [])}
    assert "optim.lr" in names and "optim.renamed" not in names
