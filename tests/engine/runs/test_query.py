"""Query language of run lists: conditions, names, values, columns and sort order."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import UsageError
from engine.runs.fields import Names, field_names, find_field, names_of
from engine.runs.keys import quote_key
from engine.runs.metrics import METRIC_PREFIX, Better, better_of_name
from engine.runs.query import parse_columns, parse_query
from engine.runs.run_row import RunRow
from engine.runs.run_view import SortOrder
from support.messages import has_problem, raises_problem
from support.runs.factories import make_row, with_fields

HOUR, DAY = 3600.0, 86_400.0
NOW = time.time()
BEST = make_row(
    "resnet-best", "finished", epochs=6, total_epochs=6, best_val_accuracy=0.94, val_accuracy=0.93, val_loss=0.2,
    seconds=2 * HOUR, updated_at=NOW - 2 * HOUR, started_at=time.mktime((2026, 11, 1, 14, 30, 0, 0, 0, -1)), gpus=2,
    config={"model.name": "resnet18", "optim.lr": 0.01, "model.options": {"width": 2}, "device.gpus": "0,2"},
    tags=("night", "keep"), note="the Paper's run", parameters=11_000_000,
    metrics={"val/f1": 0.8, "gap>b": 2.0}, highest_metrics={"val/f1": 0.9, "gap>b": 3.0}, lowest_metrics={"gap>b": 1.0},
)  # fmt: skip
FAILED = make_row(
    "cnn-3", "failed", epochs=1, total_epochs=6, best_val_accuracy=0.5, seconds=60.0, updated_at=NOW - 3 * DAY,
    config={"optim.name": "adamw", "run.seed": 3}, started_at=0.0,
)  # fmt: skip
NEW = make_row("Stopped-early", "running", archived=True)
ROWS = [BEST, FAILED, NEW]
OWN = names_of(ROWS)


def accuracy_of(row: RunRow) -> float | None:
    return row.record.values.get("best_val_accuracy")


LOST = make_row("lost", "finished", metrics={"loss": None}, command="x")


@pytest.mark.parametrize(
    "query", ["diverged", "diverged=true", "state=diverged", "state=finished diverged=true", "-diverged=false"]
)
def test_query_finds_runs_that_diverged(query: str) -> None:
    assert parse_query(query).filter([*ROWS, LOST]) == [LOST]


MATCHES = {
    "": [BEST, FAILED, NEW],
    "failed": [FAILED],
    "stopped": [],
    "stop": [NEW],
    "RESNET": [BEST],
    "res*st": [BEST],
    "night": [BEST],
    "-night": [FAILED, NEW],
    "!night": [FAILED, NEW],
    "paper": [BEST],
    '"paper\'s run"': [BEST],
    "state=failed": [FAILED],
    "state!=failed": [BEST, NEW],
    "state=fail*": [FAILED],
    "state=failed,running": [FAILED, NEW],
    "accuracy>0.9": [BEST],
    "val_accuracy>=93%": [BEST],
    "accuracy<0.9": [FAILED],
    "-accuracy<0.9": [BEST, NEW],
    "accuracy!=0.94": [FAILED],
    "model=resnet18": [BEST],
    "model=resnet*": [BEST],
    "model.name=cnn": [FAILED],
    "model=resnet18,cnn": [BEST, FAILED],
    "model.options.width>1": [BEST],
    "gpus=2": [BEST],
    "device.gpus=0,2": [BEST],
    "parameters>1M": [BEST],
    "lr<=1e-2": [BEST],
    "lr=0.05": [FAILED],
    "optimizer=AdamW": [FAILED],
    "seed=3": [FAILED],
    "seed=?": [BEST, FAILED],
    "weight_decay=0": [BEST, FAILED],
    "model.weights=none": [BEST, FAILED],
    "optim.decay_norms=true": [BEST, FAILED],
    "tag=night": [BEST],
    "tag=ni*": [BEST],
    "tag!=night": [FAILED, NEW],
    "-tag=keep": [FAILED, NEW],
    "note~PAPER": [BEST],
    "note!~paper": [FAILED, NEW],
    "duration>1h": [BEST],
    "duration<=1min": [FAILED],
    "started=2026-11-01": [BEST],
    "started>2026-11-01": [],
    "started>=2026-11-01": [BEST],
    "started<2026-11-01": [FAILED],
    "started<=2026-11-01": [BEST, FAILED],
    "started>2026-11-01T14:00": [BEST],
    "started=2026-11-01T14:*": [BEST],
    "val/f1>0.85": [],
    "best_val/f1>0.85": [BEST],
    "metrics.val/f1=0.8": [BEST],
    "best_metrics.val/f1=90%": [BEST],
    '"gap>b">1': [BEST],
    'metrics."gap>b">1': [BEST],
    'best_metrics."gap>b">=3': [BEST],
    ">1": [],
    '-"gap>b">1': [FAILED, NEW],
    '"best_metrics.gap>b">=3': [BEST],
    '"note~the paper"': [BEST],
    "epoch>2": [BEST],
    "total_epochs=6": [BEST, FAILED],
    "seconds>1h": [BEST],
    "archived=yes": [NEW],
    "live=no": [BEST, FAILED],
    "name>d": [BEST, NEW],
    "optim.name=adamw accuracy>0.4 failed": [FAILED],
    "optim.name=adamw accuracy>0.9": [],
}
ERRORS = {
    "acuracy>0.9": ("unknown-key", "acuracy", "accuracy?"),
    "val/f2>1": ("unknown-key", "val/f2", "val/f1?"),
    '"a b>1"': ("invalid-value", '"a b>1"', 'write "a b">1'),
    '-"a b>=c d"': ("invalid-value", '-"a b>=c d"', 'write -"a b">="c d"'),
    "a+b>1": ("invalid-value", "a+b>1", 'write "a+b">1'),
    "5fold=1": ("invalid-value", "5fold=1", 'write "5fold"=1'),
    "éclair>1": ("unknown-key", "éclair"),
    "top6>0.9": ("unknown-key", "top6"),
    '"gap>c">1': ("unknown-key", "gap>c", '"gap>b"?'),
    '"gap>b">': ("missing-value", '"metrics.gap>b">', '"metrics.gap>b">VALUE'),
    "optim.nam=sgd": ("unknown-key", "optim.nam", "optim.name?"),
    "accuracy>high": ("invalid-value", "best_val_accuracy", "high", "0.9", "90%"),
    "accuracy=nan": ("invalid-value", "best_val_accuracy", "nan"),
    "lr>high": ("invalid-value", "optim.lr", "high", "0.9, 90%", "10k"),
    "age<soon": ("invalid-value", "age", "soon", "90s, 5min, 1h30m", "2d"),
    "started>soon": ("invalid-value", "started_at", "soon", "2026-11-01", "2026-11-01T14:30"),
    "started>2026-31-12": ("invalid-value", "started_at", "2026-31-12", "2026-11-01"),
    "archived=maybe": ("invalid-value", "archived", "maybe", "yes", "no"),
    "state=failde": ("unknown-value", "state", "failde", "waiting, starting"),
    "tag>night": ("not-supported", "tags>night", "tags", "=", "!="),
    "lr=": ("missing-value", "optim.lr=", "optim.lr=VALUE"),
    "options=2": ("ambiguous-name", "options", "model.options, optim.options"),
}


@pytest.mark.parametrize(("text", "expected"), [("age<2d", ["new"]), ("age>1d12h", ["long"])])
def test_query_compares_age_since_start(text: str, expected: list[str]) -> None:
    rows = [
        with_fields(BEST._replace(name="new"), started_at=NOW - 2 * HOUR, updated_at=NOW),
        with_fields(FAILED._replace(name="long"), started_at=NOW - 3 * DAY, updated_at=NOW),
    ]
    assert [row.name for row in parse_query(text).filter(rows)] == expected


@pytest.mark.parametrize(("text", "expected"), MATCHES.items(), ids=MATCHES)
def test_query_selects_matching_rows_in_their_order(text: str, expected: list[RunRow]) -> None:
    assert parse_query(text, OWN).filter(ROWS) == expected


@pytest.mark.parametrize(("text", "expected"), ERRORS.items(), ids=ERRORS)
def test_query_refuses_invalid_condition_with_one_problem(text: str, expected: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        parse_query(text, OWN)
    assert has_problem(error.value.problems, *expected) and len(error.value.problems) == 1


def test_query_reports_every_invalid_condition() -> None:
    with pytest.raises(UsageError) as error:
        parse_query(["acuracy>1 failed", "age<soon"])
    assert [problem.location for problem in error.value.problems] == ["acuracy", "age"]


def test_unknown_config_matches_no_condition() -> None:
    unread = with_fields(BEST, config=None)
    assert parse_query("model=cnn").filter([unread]) == parse_query("model!=cnn").filter([unread]) == []
    assert find_field("lr").value(unread) is None and find_field("lr").value(FAILED) == 0.05


@given(st.text(max_size=40))
def test_query_of_any_text_parses_or_is_refused(text: str) -> None:
    try:
        query = parse_query(text)
    except UsageError:
        return
    assert all(row in ROWS for row in query.filter(ROWS))


@given(
    st.sampled_from(sorted(field_names())),
    st.sampled_from(["=", "!=", ">", "<=", "~"]),
    st.text(min_size=1, max_size=12),
)
def test_negated_condition_matches_all_other_rows(name: str, sign: str, value: str) -> None:
    word = f"{name}{sign}{value}".replace('"', "").replace("'", "")
    try:
        matching, others = parse_query([word]).filter(ROWS), parse_query(["-" + word]).filter(ROWS)
    except UsageError:
        return
    if len(word.split()) == 1:
        assert sorted(row.name for row in (*matching, *others)) == sorted(row.name for row in ROWS)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8), st.booleans())
def test_sort_puts_unknown_values_last_and_keeps_order_of_equals(values: list[float | None], reverse: bool) -> None:
    rows = [
        with_fields(BEST._replace(name=str(number)), best_val_accuracy=value) for number, value in enumerate(values)
    ]
    sorted_rows = SortOrder.parse("accuracy", reverse=reverse).sort(rows)
    direction = 1 if reverse else -1
    expected = sorted(rows, key=lambda row: math.inf if (value := accuracy_of(row)) is None else direction * value)
    assert sorted_rows == expected


def test_sort_begins_with_best_newest_and_first_name() -> None:
    assert SortOrder.parse("accuracy").sort(ROWS) == [BEST, FAILED, NEW]
    assert SortOrder.parse("-accuracy").sort(ROWS) == [FAILED, BEST, NEW]
    assert SortOrder.parse("name").sort(ROWS) == [FAILED, BEST, NEW]
    assert SortOrder.parse("model", reverse=True).sort(ROWS) == [BEST, FAILED, NEW]
    mixed = [with_fields(BEST._replace(name=str(value)), config={"data.workers": value}) for value in ("auto", 4, 10)]
    assert [row.name for row in SortOrder.parse("workers").sort(mixed)] == ["4", "10", "auto"]


def test_columns_take_aliases_once_and_refuse_unknown_names() -> None:
    assert [field.name for field in parse_columns("name, lr,optim.lr,acc,learning_rate")] == [
        "name",
        "optim.lr",
        "best_val_accuracy",
    ]
    with raises_problem("unknown-key", "duratoin", "duration?"):
        parse_columns("name,duratoin")
    with raises_problem("missing-value", "columns"):
        parse_columns(" , ")


@given(st.text(min_size=1, max_size=12), st.booleans())
def test_key_of_any_metric_is_found_in_query_sort_and_columns(name: str, best: bool) -> None:
    values = {name: 0.5}
    row = make_row("a", "finished", metrics=values, highest_metrics=values, lowest_metrics=values)
    key = f"best_{METRIC_PREFIX}{name}" if best else METRIC_PREFIX + name
    own = names_of([row])
    assert parse_query(f"finished {quote_key(key)}>=0.5", own).filter([row]) == [row]
    assert parse_query([f"-{quote_key(key)}>=0.5"], own).filter([row]) == []
    assert (
        SortOrder.parse(quote_key(key), own).field.name == SortOrder.parse(f"-{quote_key(key)}", own).field.name == key
    )
    assert [field.name for field in parse_columns(f"name, {quote_key(key)},lr", own)] == ["name", key, "optim.lr"]


def test_bare_name_of_metric_means_config_key_and_metric_of_registry_first() -> None:
    own = Names(tuple((name, Better.HIGH) for name in ("lr", "val_loss", "f1", "best_f1")))
    names = [field.name for field in parse_columns("lr,val_loss,f1,best_f1,best_best_f1,metrics.lr", own)]
    assert names == ["optim.lr", "val_loss", "metrics.f1", "metrics.best_f1", "best_metrics.best_f1", "metrics.lr"]


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(("valLoss", "low"), ("val/WER@5", "low"), ("top1_err", "low"), ("RMSE", "low"), ("test.ppl", "low")),
        *(("top1_errors", "low"), ("val/losses", "low"), ("logloss", "low"), ("LogLoss", "low"), ("sMAPE", "low")),
        *(("crossentropy", "low"), ("cross_entropy", "low"), ("entropy", "low"), ("mape", "low"), ("smape", "low")),
        *(("bpb", "low"), ("bits_per_byte", "low"), ("EER", "low"), ("FID50k", "low"), ("ece@15", "low")),
        *(("brier", "low"), ("latency_ms", "low")),
        *(("f1", "high"), ("Glossy", "high"), ("terror", "high"), ("recall@5", "high"), ("timely", "high")),
        *(("fidelity", "high"), ("piece", "high"), ("time_to_live", "high")),
    ],
)
def test_better_of_name_follows_its_words(name: str, better: str) -> None:
    assert better_of_name(name) == better


@pytest.mark.parametrize(("text", "matches"), [("metrics.acc>80%", True), ("metrics.acc>90%", False)])
def test_percentage_compares_with_a_printed_percentage(text: str, matches: bool) -> None:
    row = make_row("printed", "finished", metrics={"acc": 84.0}, command="x")
    assert bool(parse_query(text, names_of([row])).filter([row])) is matches
