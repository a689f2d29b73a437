"""What is written in place of characters that a terminal or its encoding lacks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual._border import BORDER_CHARS

import tui
from tui.characters import (
    BRAILLE,
    CELLS_HANDLER,
    CONSOLE_CHARACTERS,
    FALLBACKS,
    find_drawable,
    limit_characters,
)

XTERM = {"TERM": "xterm-256color"}
ALL = [*FALLBACKS, *map(chr, BRAILLE)]


@pytest.mark.parametrize("codec", ["gputrain_ascii_utf-8", "gputrain_console_utf-8", "gputrain_encoded_iso8859-1"])
def test_replacements_are_drawable_and_as_wide_as_what_they_replace(codec: str) -> None:
    encoding = codec.rpartition("_")[2]
    written = [character.encode(codec).decode(encoding) for character in ALL]
    assert list(map(cell_len, written)) == list(map(cell_len, ALL))
    drawable = {"gputrain_console_utf-8": CONSOLE_CHARACTERS, "gputrain_encoded_iso8859-1": "°±×÷·"}.get(codec, "")
    assert {character for character in "".join(written) if not character.isascii()} == set(drawable) & set(ALL)


def test_replacements_exist_for_all_symbols_of_the_screens() -> None:
    sources = Path(tui.__file__).parent.rglob("*.py")
    used = {character for path in sources for character in path.read_text(encoding="utf-8") if not character.isascii()}
    borders = {
        character for rows in BORDER_CHARS.values() for row in rows for character in row if not character.isascii()
    }
    assert used | borders <= set(ALL)


@pytest.mark.parametrize(
    ("encoding", "environment", "drawable"),
    [
        ("utf-8", XTERM, None),
        ("utf-8", {"TERM": "linux"}, "console"),
        ("utf-8", {"TERM": "vt100"}, "ascii"),
        ("iso8859-1", XTERM, "encoded"),
        ("utf-8", XTERM | {"LC_ALL": "C"}, "ascii"),
        ("utf-8", XTERM | {"LC_ALL": "C", "PYTHONIOENCODING": "utf-8"}, None),
        ("utf-8", XTERM | {"GPUTRAIN_CHARACTERS": "ascii"}, "ascii"),
        ("iso8859-1", {"TERM": "linux", "GPUTRAIN_CHARACTERS": "UTF-8"}, None),
    ],
)
def test_find_drawable_reads_setting_terminal_and_encoding(
    encoding: str, environment: dict[str, str], drawable: str | None
) -> None:
    assert find_drawable(encoding, is_terminal=True, environment=environment) == drawable


def test_find_drawable_ignores_terminal_of_other_streams() -> None:
    assert find_drawable("utf-8", is_terminal=False, environment={"TERM": "vt100"}) is None


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


def test_limited_stream_of_the_screen_writes_as_many_cells() -> None:
    assert limited("iso8859-1", "│é 日本e\u0301…", CELLS_HANDLER) == b"|\xe9 ????e~"
