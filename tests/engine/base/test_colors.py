"""Lines with SGR sequences: canonical styles, and nothing else that a terminal would obey."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.colors import change_style, with_colors, without_colors


@pytest.mark.parametrize(
    ("style", "parameters", "changed"),
    [
        ("", "1;31", "1;31"),
        ("1;31", "32", "1;32"),
        ("1;31", "", ""),
        ("1;31", "22", "31"),
        ("31;44", "39", "44"),
        ("31;44", "49", "31"),
        ("", "01;031", "1;31"),
        ("", "38;5;12;48;5;200", "38;5;12;48;5;200"),
        ("", "38;2;1;2;3", "38;2;1;2;3"),
        ("", "38:2::1:2:3", "38;2;1;2;3"),
        ("", "38:5:7;1", "1;38;5;7"),
        ("", "4:3", "4"),
        ("4", "4:0", ""),
        ("", "58;5;1;31", "31"),
        ("31", "38;5;256", ""),
        ("31", "38;5", "38;5;0"),
        ("31", "38;9;1", "1"),
        ("31", "5;8;53;999;107", "31;107"),
        ("", "1" * 120, ""),
    ],
)
def test_change_style_is_canonical(style: str, parameters: str, changed: str) -> None:
    assert change_style(style, parameters) == changed


def test_line_with_colors_ends_in_the_default_style() -> None:
    assert with_colors("a\x1b[31mb") == "a\x1b[0;31mb\x1b[0m"
    assert with_colors("a\x1b[31m") == "a"


def test_other_escape_sequences_become_visible() -> None:
    line = "\x1b[2Ja\x1b]0;title\x07\x1b[31mred\x9b1m\x1b[?1m\ttab\r\n"
    assert without_colors(line) == "\\x1b[2Ja\\x1b]0;title\\x07red\\x9b1m\\x1b[?1m\ttab\\r\\n"


@given(st.text(alphabet=st.sampled_from("\x1b[];:?0123589mJKax\x07\x9b\t\n\r\u202e\u0301")))
def test_only_canonical_sgr_sequences_reach_a_terminal(text: str) -> None:
    line = with_colors(text)
    rest = re.sub(r"\x1b\[0(;\d{1,3})*m", "", line)
    assert rest.replace("\t", "").isprintable()
    assert rest == without_colors(text)
    assert with_colors(line) == line
