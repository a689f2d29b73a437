"""The registry of metrics in `gputrain runs` and `gputrain compare`: one key is one number and one order in both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.runs.comparison import ComparedRun, compare_runs
from engine.runs.folder import RunState
from engine.runs.keys import quote_key
from engine.runs.metric_directions import DIRECTIONS_FILE, read_directions, store_direction
from engine.runs.metrics import METRICS, Aggregate, Better, Metric, Unit, own_metrics
from engine.runs.query import parse_columns
from engine.runs.run_record import RunRecord
from engine.runs.run_row import RunRow
from engine.runs.sort_order import SortOrder
from support.messages import says
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.runs.trained_run import call

RECORDED = [key for key, metric in METRICS.items() if metric.is_recorded]
DIRECTIONS = {"gap": Better.LOW, "wer": Better.HIGH}
NUMBERS = st.one_of(st.integers(0, 3), st.floats(0, 3))


@pytest.fixture
def loss_gap() -> Iterator[Metric]:
    """A row of the registry that gputrain does not have."""

    def read(record: RunRecord) -> float | None:
        if record.val_loss is None or record.train_loss is None:
            return None
        return record.val_loss - record.train_loss

    metric = Metric(
        "loss_gap", "loss gap", "validation minus training loss", Unit.SCORE, Better.LOW, Aggregate.LAST, read
    )
    METRICS[metric.key] = metric
    yield metric
    del METRICS[metric.key]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: `a` has the largest gap between the losses, `c` the smallest."""
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    for number, name in enumerate("abc"):
        first, last = (
            replace(
                make_epoch(epoch, 0.9 - epoch / 10, 10.0 * epoch), val_loss=2.0, train_loss=1.0 + number / 4,
                metrics={"val f1": 0.5 + number / 10 - epoch / 10, "eval/gap": 0.5 - number / 10 + epoch / 10},
            )
            for epoch in (1, 2)
        )  # fmt: skip
        make_run_folder(tmp_path, name, make_run_started(), first, last)
    return tmp_path


def names(*arguments: str) -> list[str]:
    result = call("runs", "-q", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


@st.composite
def records(draw: st.DrawFn) -> RunRecord:
    values: dict[str, Any] = {key: draw(NUMBERS) for key in ("epochs", "step", "seconds")}
    for key in RECORDED:
        if key not in values:
            values[key] = draw(st.none() | NUMBERS)
    own = draw(st.dictionaries(st.sampled_from(["gap", "wer", "val/loss", "f 1"]), st.tuples(NUMBERS, NUMBERS)))
    return RunRecord(
        state=RunState.FINISHED,
        **{key: value for key, value in values.items() if not METRICS[key].is_stored},
        last_values={key: value for key, value in values.items() if METRICS[key].is_stored},
        metrics={name: draw(st.none() | NUMBERS) for name in own},
        lowest_metrics={name: min(pair) for name, pair in own.items()},
        highest_metrics={name: max(pair) for name, pair in own.items()},
    )


# The first draw imports the config schema.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(records(), min_size=2, max_size=4))
def test_runs_and_compare_order_runs_alike_by_every_key(found: list[RunRecord]) -> None:
    rows = [RunRow(str(number), "", "finished", record=record) for number, record in enumerate(found)]
    runs = [ComparedRun(row.name, "", row.state, None, row.record) for row in rows]
    compared: dict[str, Any] = compare_runs(runs, DIRECTIONS).to_dict()
    own = own_metrics(found, DIRECTIONS)
    keys = [*RECORDED, *(f"{prefix}.{name}" for name in own for prefix in ("metrics", "best_metrics"))]
    assert sorted(compared["runs"][0]["figures"]) == sorted(keys)
    for key in keys:
        order = SortOrder.parse(quote_key(key), own)
        figures = [run["figures"][key] for run in compared["runs"]]
        assert figures == [parse_columns(quote_key(key), own)[0].value(row) for row in rows]
        known = [number for number, value in enumerate(figures) if value is not None]
        expected = sorted(known, key=figures.__getitem__, reverse=order.descending)
        shown = [int(row.name) for row in order.sort(rows)]
        assert shown[: len(known)] == expected
        if best := compared["best"].get(key):
            # Values that are shown with the same digits are equally good.
            assert {number for number in known if figures[number] == figures[shown[0]]} <= set(best)


def test_row_of_registry_appears_in_lists_and_comparisons(root: Path, loss_gap: Metric) -> None:
    assert names("--sort", "loss_gap") == ["c", "b", "a"] == list(reversed(names("--sort=-loss_gap")))
    assert names("loss_gap<0.6") == ["c"]
    table = [line.split() for line in call("runs", "--columns", "name,loss-gap", "--sort", "name").stdout.splitlines()]
    assert table == [["name", "loss", "gap"], ["a", "1.0000"], ["b", "0.7500"], ["c", "0.5000"]]
    values = json.loads(call("compare", "a", "c", "--json").stdout)
    assert [run["figures"]["loss_gap"] for run in values["runs"]] == [1.0, 0.5]
    assert values["best"]["loss_gap"] == [1]
    assert any(
        line.split() == ["loss", "gap", "1.0000", "0.5000*"] for line in call("compare", "a", "c").stdout.splitlines()
    )


def test_own_metrics_are_keys_of_lists(root: Path) -> None:
    assert names("--sort", '"val f1"') == names("--sort", "val f1") == ["c", "b", "a"]
    assert names('"val f1">0.35 -"val f1">0.45') == ["b"]
    assert names("eval/gap>0.65") == ["a"]
    columns = json.loads(call("runs", "--columns", '"best_val f1",eval/gap', "--json", "a").stdout)["runs"][0][
        "columns"
    ]
    assert columns == {"best_metrics.val f1": 0.4, "metrics.eval/gap": pytest.approx(0.7)}
    result = call("runs", "eval/gp>1")
    assert result.exit_code == 2 and says(result.stderr, "unknown-key", "did you mean eval/gap?")


def test_direction_of_own_metric_is_stored_for_the_folder_or_given_as_flag(root: Path) -> None:
    assert names("--sort", "best_eval/gap") == ["a", "b", "c"]
    assert names("--sort", "best_eval/gap", "--better", "eval/gap=low") == ["c", "b", "a"]
    assert call("runs", "better", "eval/gap", "low").stderr == "eval/gap: low is better\n"
    assert names("--sort", "best_eval/gap") == ["c", "b", "a"]
    assert json.loads(call("compare", "a", "c", "--json").stdout)["best"]["best_metrics.eval/gap"] == [1]
    flag = call("compare", "a", "c", "--json", "--better", "metrics.eval/gap=high")
    assert json.loads(flag.stdout)["best"]["best_metrics.eval/gap"] == [0]
    assert call("runs", "better", "eval/gap", "auto").stderr == "eval/gap: high is better\n"
    assert read_directions(root) == {}


@pytest.mark.parametrize(
    "text", ["metrics.eval/gap", "best_metrics.eval/gap", '"eval/gap"', '"metrics.eval/gap"', 'best_metrics."eval/gap"']
)
def test_every_spelling_of_a_metric_sets_its_direction(root: Path, text: str) -> None:
    assert names("--sort", "best_eval/gap", "--better", f"{text}=low") == ["c", "b", "a"]
    assert call("runs", "better", text, "low").stderr == "eval/gap: low is better\n"
    assert read_directions(root) == {"eval/gap": Better.LOW}


def test_better_warns_of_a_metric_that_no_run_has(root: Path) -> None:
    result = call("runs", "better", "eval/gpa", "low")
    assert result.exit_code == 0 and says(result.stderr, "unknown-key", "warning: eval/gpa", "did you mean eval/gap?")
    assert read_directions(root) == {"eval/gpa": Better.LOW}


def test_better_does_not_overwrite_directions_of_another_format(root: Path) -> None:
    stored = '{"format": 2, "better": {"f1": "low"}}'
    (root / DIRECTIONS_FILE).write_text(stored)
    result = call("runs", "better", "eval/gap", "low")
    assert result.exit_code == 2 and says(result.stderr, "wrong-version", DIRECTIONS_FILE)
    assert (root / DIRECTIONS_FILE).read_text() == stored


def test_concurrent_directions_are_all_stored(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: store_direction(tmp_path, f"m{number}", Better.LOW), range(40)))
    assert len(read_directions(tmp_path)) == 40


@pytest.mark.parametrize("text", ["eval/gap", "eval/gap=", "=low", "eval/gap=lowest"])
def test_direction_that_is_none_is_refused(root: Path, text: str) -> None:
    result = call("runs", "--better", text)
    assert result.exit_code == 2 and says(result.stderr, "invalid-value", "--better", text)


def test_better_refuses_other_directions_and_folder_that_cannot_be_written(root: Path) -> None:
    result = call("runs", "better", "f1", "up")
    assert result.exit_code == 2 and says(result.stderr, "unknown-value", "up", "low, high, auto")
    (root / DIRECTIONS_FILE).mkdir()
    result = call("runs", "better", "f1", "low")
    assert result.exit_code == 2 and says(result.stderr, "not-writable", DIRECTIONS_FILE)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2, "better": {"f1": "low"}}', '{"format": 1, "better": 3}', "{" * 100_000]
)
def test_damaged_directions_are_those_of_the_names(tmp_path: Path, text: str) -> None:
    (tmp_path / DIRECTIONS_FILE).write_text(text)
    assert read_directions(tmp_path) == {}


def test_directions_of_others_are_only_low_and_high(tmp_path: Path) -> None:
    stored = {"format": 1, "better": {"a": "low", "b": "\x1b[2J", "c": 3, "d": "high"}}
    (tmp_path / DIRECTIONS_FILE).write_text(json.dumps(stored))
    assert read_directions(tmp_path) == {"a": Better.LOW, "d": Better.HIGH}


def test_runs_names_best_key_that_finds_runs(root: Path) -> None:
    result = call("runs", "val_accuracy>0.75", "name~a")
    assert result.stdout == "" and "val_accuracy means the last epoch; " in result.stderr
    assert "'best_val_accuracy>0.75' finds 1 run.\n" in result.stderr
    assert "finds" not in call("runs", "val_accuracy>0.95").stderr
