"""SPACE: how the values of a key are typed, what lies in them, and the points of a grid."""

from __future__ import annotations

import pytest

from engine.base.errors import UsageError
from engine.jobs.sweeps.space import Choices, Range, Space, grid_size, overrides_of, parse_space
from support.messages import has_problem, raises_problem


@pytest.mark.parametrize(
    ("key", "text", "space"),
    [
        ("optim.lr", "log:1e-3..0.3", Range(1e-3, 0.3, log=True)),
        ("optim.momentum", "0.1..0.9", Range(0.1, 0.9)),
        ("optim.lr", ".1..1", Range(0.1, 1.0)),
        ("run.epochs", "int:1..8", Range(1, 8, integer=True)),
        # The schema takes only integers here.
        ("run.epochs", "1..8", Range(1, 8, integer=True)),
        ("data.batch_size", "log:8..64", Range(8, 64, log=True, integer=True)),
        ("optim.name", "sgd, adamw", Choices(("sgd", "adamw"))),
        ("schedule.milestones", "[30,60],[40,80]", Choices(("[30,60]", "[40,80]"))),
        ("optim.name", "sgd", None),
        ("schedule.milestones", "[30,60]", None),
        ("data.path", "../1..2", None),
    ],
)
def test_space_is_parsed_as_typed(key: str, text: str, space: Space | None) -> None:
    assert parse_space(key, text) == space


@pytest.mark.parametrize(
    ("key", "text", "code"),
    [
        ("optim.lr", "0.3..0.1", "out-of-range"),
        ("optim.lr", "log:0..1", "out-of-range"),
        ("optim.lr", "log:fast", "invalid-value"),
        ("optim.lr", "1e999..2", "out-of-range"),
        ("run.epochs", "1.5..3", "invalid-value"),
        ("optim.name", "sgd,,adamw", "missing-value"),
        ("optim.name", "sgd,sgd", "duplicate-value"),
    ],
)
def test_space_refuses_what_is_no_range_and_no_choice(key: str, text: str, code: str) -> None:
    with raises_problem(code, key, repr(text)):
        parse_space(key, text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("log:1..slack://secret", "invalid-value"),
        ("slack://secret,", "missing-value"),
        ("slack://secret,slack://secret", "duplicate-value"),
    ],
)
def test_space_repeats_no_url(text: str, code: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_space("notify.urls", text)
    assert has_problem(error.value.problems, code, "notify.urls")
    assert "secret" not in str(error.value)


def test_grid_has_both_ends_and_round_numbers() -> None:
    assert Range(1e-4, 1.0, log=True).grid() == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert Range(0.1, 0.5).grid() == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert Range(1, 8, integer=True).grid() == list(range(1, 9))
    assert Range(8, 128, log=True, integer=True).grid() == [8, 16, 32, 64, 128]
    spaces: dict[str, Space] = {"a.b": Range(1, 3, integer=True), "c.d": Choices(("x", "y"))}
    assert grid_size(spaces, {"a.b": 2, "c.d": "x"}) == 6
    assert grid_size(spaces, {"c.d": "x"}) == 7


def test_range_contains_only_its_numbers() -> None:
    integers, numbers = Range(1, 8, integer=True), Range(0.0, 1.0)
    assert [integers.contains(value) for value in (1, 8, 9, 2.5, "auto", None, True)] == [True, True] + [False] * 5
    assert [numbers.contains(value) for value in (0, 0.5, 1.1)] == [True, True, False]


def test_overrides_keep_all_digits() -> None:
    assert overrides_of({"optim.lr": 0.1 + 0.2, "run.epochs": 3, "optim.name": "sgd"}) == [
        "optim.lr=0.30000000000000004",
        "run.epochs=3",
        "optim.name=sgd",
    ]
