"""Brace patterns of shards."""

from __future__ import annotations

import pytest

from engine.data.sources.braces import expand_braces
from engine.utils.errors import CodedError
from support.messages import raises_problem


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("t-{08..11}.tar", ["t-08.tar", "t-09.tar", "t-10.tar", "t-11.tar"]),
        ("t-{8..11}", ["t-8", "t-9", "t-10", "t-11"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{a,b{0..1},}x", ["ax", "b0x", "b1x", "x"]),
        ("{only}-{0..1}", ["{only}-0", "{only}-1"]),
        ("{open", ["{open"]),
        ("}{0..1}", ["}0", "}1"]),
    ],
)
def test_expand_braces_follows_bash(pattern: str, names: list[str]) -> None:
    assert expand_braces(pattern, 10) == names


@pytest.mark.parametrize("pattern", ["{0..999999999}", "{0..9}{0..9}", "{" * 5000, "{a," * 17])
def test_expand_braces_bounds_names(pattern: str) -> None:
    with raises_problem("too-many", kind=CodedError):
        expand_braces(pattern, 50)
