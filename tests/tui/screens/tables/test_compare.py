"""The table of a comparison: what it has, and that it fits each width with the names of all runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.report.foreign_run import read_run
from engine.report.table import line_text, line_width
from engine.runs.comparison import Comparison, compare_runs
from engine.runs.find import OpenedRun
from engine.runs.metrics import Better
from engine.watch.folders import find_runs
from support.replace import replace
from support.runs.compared_runs import make_compared_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from tui.screens.tables.compare import ComparedRun, ComparedValue, compared_values, fit_runs, format_comparison

NAME = "run-of-some-length"


def compare(runs: list[OpenedRun]) -> Comparison:
    return compare_runs([read_run(run) for run in runs])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Own runs, one without metrics and one whose loss is NaN, and runs of another program."""
    root = Path(tmp_path_factory.mktemp("mixed"))
    runs: list[OpenedRun] = [
        make_compared_run(root / "runs", f"{NAME}-{number}", lr=0.0123456 * (number + 1), seed=number, epochs=1)
        for number in range(3)
    ]
    runs.append(make_run_folder(root / "runs", f"{NAME}-empty"))
    not_finite = replace(make_epoch(1, math.nan), val_loss=math.nan)
    runs.append(make_run_folder(root / "runs", f"{NAME}-nan", make_run_started(), not_finite))
    for number in range(2):
        folder = root / "logs" / f"{NAME}-other-{number}"
        folder.mkdir(parents=True)
        rows = ({"step": step, "val/loss": math.nan if step == 2 else number + 1 / step} for step in (1, 2, 3))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parameters = {"lr": 0.1, "width": 2 + number, "output_dir": str(folder), "run_name": f"r{number}"}
        (folder / "hparams.yaml").write_text(json.dumps(parameters))
    return compare([*runs, *find_runs(root / "logs").runs])


def listed(comparison: Comparison) -> list[ComparedRun]:
    return [ComparedRun(index, run.name, run.shown_state, index) for index, run in enumerate(comparison.runs)]


@settings(deadline=None, max_examples=60)
@given(width=st.integers(20, 250), first=st.integers(0, 40), with_baseline=st.booleans())
def test_table_of_the_screen_fits_each_width_and_has_names(
    mixed: Comparison, width: int, first: int, with_baseline: bool
) -> None:
    groups = mixed.columns(grouped=False)
    values = compared_values(mixed, groups, groups[0] if with_baseline else None)
    table, first_shown, hidden = fit_runs(listed(mixed), values, first, width)
    lines = [table.header(), *map(table.line, listed(mixed))]
    assert max(map(line_width, lines)) <= width
    for line, run in zip(lines[1:], mixed.runs, strict=True):
        # The end of a name tells runs apart.
        assert line_text(line).split()[1][-3:].rstrip("…") in run.name and run.name[-1] in line_text(line)
    shown = len(values) - first_shown - hidden
    assert first_shown <= first and (shown > 0 or width < 60)
    if first_shown and not hidden:
        assert len(fit_runs(listed(mixed), values, first_shown - 1, width)[0].columns) <= len(table.columns)


@settings(deadline=None, max_examples=40)
@given(width=st.integers(60, 250), transposed=st.booleans())
def test_printed_table_fits_each_width(mixed: Comparison, width: int, transposed: bool) -> None:
    lines = format_comparison(mixed, width, 0, transposed=transposed).splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(run.name[-5:] in line for line in lines) for run in mixed.runs)


def test_only_keys_that_can_change_results_are_compared_with_four_digits(mixed: Comparison) -> None:
    keys = {value.label: value for value in compared_values(mixed, mixed.columns(grouped=False)) if value.is_config}
    assert {"optim.lr", "run.seed", "width"} <= keys.keys()
    assert keys.keys().isdisjoint({"run.name", "output_dir", "run_name"})
    assert keys["optim.lr"].cells[:3] == ("0.01235", "0.02469", "0.03704")


def test_most_important_metric_is_first_and_numbers_of_the_setup_are_dropped_if_equal(mixed: Comparison) -> None:
    labels = [value.label for value in compared_values(mixed, mixed.columns(grouped=False))]
    assert labels[0] == "best val acc" and "ranks" not in labels


def test_order_has_the_best_values_first_and_unknown_ones_last() -> None:
    values = ComparedValue("acc", ("", "", ""), (0.5, None, 0.75), better=Better.HIGH)
    assert values.order() == [2, 0, 1]
    assert replace(values, better="low").order() == [0, 2, 1]
    assert ComparedValue("key", ("", "", ""), ("sgd", 3, None)).order() == [1, 0, 2]


@pytest.mark.parametrize("count", [2, 200])
def test_comparison_of_two_and_of_many_runs_has_a_row_each(tmp_path: Path, count: int) -> None:
    run = make_compared_run(tmp_path, "a", epochs=1)
    row = read_run(run)
    comparison = compare_runs([row._replace(name=f"r{number:03d}") for number in range(count)])
    text = format_comparison(comparison, 120)
    assert text.count("\nr0") + text.count("\nr1") == count * text.count("run  ")


def test_single_run_has_all_its_numbers(tmp_path: Path) -> None:
    comparison = compare([make_compared_run(tmp_path, "a", epochs=1)])
    assert "ranks" in [value.label for value in compared_values(comparison, comparison.columns(grouped=False))]


def test_difference_from_baseline_has_no_digits_that_the_values_hide(tmp_path: Path) -> None:
    epochs = [make_epoch(1, 0.5), replace(make_epoch(1, 0.5), val_loss=make_epoch(1, 0.5).val_loss + 1e-7)]
    runs = [
        make_run_folder(tmp_path, name, make_run_started(), epoch) for name, epoch in zip("ab", epochs, strict=True)
    ]
    comparison = compare(list(runs))
    columns = comparison.columns(grouped=False)
    assert not any("e-" in cell for value in compared_values(comparison, columns, columns[0]) for cell in value.cells)
