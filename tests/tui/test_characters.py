"""What is written in place of characters that a terminal or its encoding lacks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual._border import BORDER_CHARS

import tui
from tui.characters import CELLS_HANDLER, FALLBACKS, find_encoding, limit_characters

XTERM = {"TERM": "xterm-256color"}


@pytest.mark.parametrize(("encoding", "drawable"), [("ascii", ""), ("iso8859-1", "°±×÷·")])
def test_replacements_are_drawable_and_as_wide_as_what_they_replace(encoding: str, drawable: str) -> None:
    written = [character.encode(f"gputrain_{encoding}").decode(encoding) for character in FALLBACKS]
    assert list(map(cell_len, written)) == list(map(cell_len, FALLBACKS))
    assert {character for character in "".join(written) if not character.isascii()} == set(drawable)


def test_replacements_exist_for_all_symbols_of_the_screens() -> None:
    sources = Path(tui.__file__).parent.rglob("*.py")
    used = {character for path in sources for character in path.read_text(encoding="utf-8") if not character.isascii()}
    borders = {
        character for rows in BORDER_CHARS.values() for row in rows for character in row if not character.isascii()
    }
    assert used | borders <= set(FALLBACKS)


@pytest.mark.parametrize(
    ("encoding", "environment", "limit"),
    [
        ("utf-8", XTERM, None),
        ("utf-8", {"TERM": "linux"}, "ascii"),
        ("iso8859-1", XTERM, "iso8859-1"),
        ("utf-8", XTERM | {"LC_ALL": "C"}, "ascii"),
        ("utf-8", XTERM | {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, None),
        ("utf-8", XTERM | {"GPUTRAIN_CHARACTERS": "ascii"}, "ascii"),
        ("iso8859-1", {"TERM": "linux", "GPUTRAIN_CHARACTERS": "UTF-8"}, None),
    ],
)
def test_find_encoding_reads_setting_terminal_and_encoding(
    encoding: str, environment: dict[str, str], limit: str | None
) -> None:
    assert find_encoding(encoding, is_terminal=True, environment=environment) == limit


def test_find_encoding_ignores_terminal_of_other_streams() -> None:
    assert find_encoding("utf-8", is_terminal=False, environment={"TERM": "vt100"}) is None


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
    assert limited("utf-8", "│日\udc80", GPUTRAIN_CHARACTERS="ascii") == rb"|\u65e5\udc80"
    assert limited("iso8859-1", "│日", GPUTRAIN_CHARACTERS="utf-8") == "│日".encode()


def test_limited_stream_of_the_screen_writes_as_many_cells() -> None:
    assert limited("iso8859-1", "│é 日本e\u0301…", CELLS_HANDLER) == b"|\xe9 ????e~"
