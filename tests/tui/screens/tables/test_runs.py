"""The table of runs: which columns fit, titles and cells."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.report.table import FittedTable, line_width
from engine.runs.fields import Names, find_field
from engine.runs.metrics import Better
from engine.runs.run_row import RunRow
from engine.runs.run_view import SortOrder
from support.runs.factories import default_fields, make_row
from tui.screens.tables import styled
from tui.screens.tables.runs import (
    DEFAULT_COLUMNS,
    NOTE_KEY,
    fit_monitor_list,
    fit_run_list,
    monitor_line,
    monitor_name_width,
    run_list_line,
)

VALUES = {
    "state": "finished", "epochs": 3, "total_epochs": 3, "best_val_accuracy": 0.9376, "val_loss": 0.2398,
    "seconds": 125.0, "global_batch": 512, "images_per_second": 6438.0, "tags": ("best", "paper"),
    "config": {"model.name": "resnet50", "optim.lr": 0.2, "data.dataset": "folder"},
}  # fmt: skip


def row(name: str, **values: Any) -> RunRow:
    return make_row(name, **(VALUES | values))


ROW = row("base")


def header(table: FittedTable[RunRow]) -> str:
    return styled(table.header()).plain


def text_of(table: FittedTable[RunRow], run: RunRow) -> str:
    return styled(run_list_line(table, run)).plain


@pytest.mark.parametrize(
    ("width", "count"),
    [(12, 0), (24, 1), (54, 4), (76, 7), (116, 11), (156, len(DEFAULT_COLUMNS)), (300, len(DEFAULT_COLUMNS))],
)
def test_table_drops_columns_from_the_right(width: int, count: int) -> None:
    table = fit_run_list([ROW], width, default_fields())
    keys = [column.key for column in table.columns if column.key != NOTE_KEY]
    assert keys == ["name", *DEFAULT_COLUMNS[:count]]
    assert line_width(table.header()) <= width and line_width(run_list_line(table, ROW)) <= width


@pytest.mark.parametrize("width", [56, 116, 216])
def test_long_names_leave_room_for_the_best_value_and_are_whole_where_there_is_room(width: int) -> None:
    rows = [row("a-run-with-a-quite-long-name-for-a-list-of-runs"), ROW]
    table = fit_run_list(rows, width, default_fields())
    assert "0.9376" in text_of(table, rows[0])
    assert (rows[0].name in text_of(table, rows[0])) is (width == 216)


def test_chosen_message_column_leaves_the_columns_after_it() -> None:
    failed = row("a", state="failed", message="not finite", epochs=3)
    table = fit_run_list([failed], 200, [find_field("message"), find_field("epochs")])
    assert re.split(r"  +", text_of(table, failed))[1:3] == ["not finite", "3/3"]


@pytest.mark.parametrize(
    "names", [Names((), ("epochs",), is_foreign=True), Names((("epochs", Better.LOW),), is_foreign=True)]
)
def test_epochs_of_other_programs_are_what_they_recorded(names: Names) -> None:
    other = make_row("other", "growing", command_parameters={"epochs": 6}, metrics={"epochs": 6.0})
    assert text_of(fit_run_list([other], 80, [find_field("epochs", names)]), other).split() == ["●", "other", "6"]


def test_table_formats_config_values_and_figures() -> None:
    fields = [find_field(name) for name in ("optim.lr", "optim.name", "duration", "tags", "val_loss", "mfu")]
    table = fit_run_list([ROW], 120, fields)
    assert header(table).split() == ["name", "lr", "optimizer", "duration", "tags", "val", "loss", "MFU", "message"]
    assert text_of(table, ROW).split() == ["○", "base", "0.2", "sgd", "2m05s", "best,paper", "0.2398", "–"]


def test_lists_name_the_best_value_of_each_run_if_their_monitors_differ() -> None:
    f1 = row("a", monitor="macro_f1", best=0.5)
    loss = row("b", monitor="loss", monitor_mode="min", best=0.25, best_val_loss=0.25)
    alone = fit_run_list([f1], 100, [find_field("best")])
    assert header(alone).split()[1:3] == ["best", "macro_f1"] and text_of(alone, f1).split()[-1] == "0.5000"
    table = fit_run_list([f1, loss, ROW], 100, [find_field("best")])
    cells = [" ".join(text_of(table, each).split()[2:]) for each in (f1, loss, ROW)]
    assert cells == ["0.5000 macro_f1", "0.2500 val loss", "0.9376 val acc"]


def test_best_of_losses_is_sorted_from_the_lowest_up() -> None:
    rows = [row(str(value), monitor="rmse", monitor_mode="min", best=value) for value in (0.5, 0.25, 0.75)]
    assert [each.name for each in SortOrder.parse("best").sort(rows)] == ["0.25", "0.5", "0.75"]


def test_table_shows_long_names_and_messages_that_were_not_measured() -> None:
    rows = [row(f"run-{number}") for number in range(1000)]
    rows[501] = row("a-much-longer-name-than-all-the-others", message="out of memory on rank 1, GPU 3 of this host")
    text = text_of(fit_run_list(rows, 300, default_fields()), rows[501])
    assert rows[501].name in text and text.endswith(rows[501].message)


def monitor_text(row: RunRow, *, marked: bool = False) -> str:
    return styled(monitor_line(fit_monitor_list([row], 8, 80, lambda _: marked), row)).plain


@pytest.mark.parametrize(("width", "is_whole"), [(76, False), (156, True)])
def test_long_name_is_shortened_on_the_monitor_only_as_far_as_the_best_value_needs(width: int, is_whole: bool) -> None:
    rows = [row("a-run-with-a-quite-long-name-for-the-monitor"), make_row("other", "waiting")]
    name_width = monitor_name_width([each.name for each in rows], width)
    line = styled(monitor_line(fit_monitor_list(rows, name_width, width), rows[0])).plain
    assert "0.9376" in line
    assert ("…" not in line) is is_whole


def test_live_run_that_cannot_record_says_so_on_the_monitor() -> None:
    message = "no news for 12s: the disk is full; the run goes on, and stop works"
    assert monitor_text(make_row("a-run", "running", message=message)) == f" ● a-run     {message}"


def test_line_of_live_sweep_counts_its_trials_and_shows_the_best_accuracy() -> None:
    row = make_row("night", "running", best_val_accuracy=0.95, message="2 running, 5 finished", trials=7)
    assert monitor_text(row) == " ●▸night     2 running, 5 finished  best val acc 0.9500"
    assert monitor_text(row, marked=True).startswith("◆●▸night ")
