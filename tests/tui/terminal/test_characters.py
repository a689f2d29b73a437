"""What is written in place of characters that a terminal or its encoding lacks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual._border import BORDER_CHARS

import tui
from tui.terminal.characters import (
    FALLBACKS,
    draws_ascii,
    limit_characters,
)

XTERM = {"TERM": "xterm-256color"}


def test_replacements_are_ascii_and_as_wide_as_what_they_replace() -> None:
    written = [character.encode("gputrain_utf-8").decode() for character in FALLBACKS]
    assert "".join(written).isascii()
    assert list(map(cell_len, written)) == list(map(cell_len, FALLBACKS))


def test_replacements_exist_for_all_symbols_of_the_screens() -> None:
    sources = Path(tui.__file__).parent.rglob("*.py")
    used = {character for path in sources for character in path.read_text(encoding="utf-8") if not character.isascii()}
    borders = {
        character for rows in BORDER_CHARS.values() for row in rows for character in row if not character.isascii()
    }
    assert used | borders <= set(FALLBACKS)


@pytest.mark.parametrize(
    ("encoding", "environment", "is_ascii"),
    [
        ("utf-8", XTERM, False),
        ("utf-8", {"TERM": "linux"}, True),
        ("iso8859-1", XTERM, True),
        ("utf-8", XTERM | {"LC_ALL": "C"}, True),
        ("utf-8", XTERM | {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, False),
        ("utf-8", XTERM | {"GPUTRAIN_CHARACTERS": "ascii"}, True),
        ("iso8859-1", {"TERM": "linux", "GPUTRAIN_CHARACTERS": "UTF-8"}, False),
    ],
)
def test_draws_ascii_reads_setting_terminal_and_encoding(
    encoding: str, environment: dict[str, str], is_ascii: bool
) -> None:
    assert draws_ascii(encoding, is_terminal=True, environment=environment) == is_ascii


def test_draws_ascii_ignores_terminal_of_other_streams() -> None:
    assert not draws_ascii("utf-8", is_terminal=False, environment={"TERM": "vt100"})


def limited(encoding: str, text: str, errors: str = "", **environment: str) -> bytes:
    """Return what a stream of this encoding writes."""
    file = io.BytesIO()
    stream = io.TextIOWrapper(file, encoding)
    limit_characters(stream, errors, environment)
    stream.write(text)
    stream.flush()
    return file.getvalue()


def test_limited_stream_escapes_what_table_and_encoding_lack() -> None:
    assert limited("iso8859-1", "│é 日…") == b"|\xe9 \\u65e5~"
    assert limited("euc-jp", "│日…") == "|日~".encode("euc-jp")
    assert limited("utf-8", "│日\udc80", GPUTRAIN_CHARACTERS="ascii") == "|日\\udc80".encode()
    assert limited("iso8859-1", "│日", GPUTRAIN_CHARACTERS="utf-8") == "│日".encode()
