"""Which characters the terminal can draw, and what is written in place of the others: one table for all output.

The entry points pass stdout and stderr to `limit_characters`, and `tui.cli.open_tui` the stream of the screen. A
replacement is as wide as what it replaces, so columns stay where they are. Characters that the table does not have,
such as those of names, are up to the encoding.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from engine.utils.errors import UsageError

CHARACTERS_VARIABLE = "GPUTRAIN_CHARACTERS"
CONSOLE_TERM = "linux"
# Terminals with 16 colors at most, also where a login from another terminal has left COLORTERM behind.
BASIC_TERMS = (CONSOLE_TERM, "vt100", "vt220", "ansi", "cons25", "eterm")
# The font of the Linux kernel (CP437) has them, and so have those of Debian's console-setup 1.221, but for Ethiopian.
# 314 of its 453 fonts have no other blocks, and none has Braille.
CONSOLE_CHARACTERS = "─│┌┐└┘├┤┬┴┼═║╔╗╚╝█░▒■•←↑→↓°±·"
# What is written in place of each of these characters. It may have a replacement itself.
REPLACED = {
    "┌": "╭┏",
    "┐": "╮┓",
    "└": "╰┗",
    "┘": "╯┛",
    "├": "┣",
    "┤": "┫",
    "┬": "┳",
    "┴": "┻",
    "┼": "╋",
    "─": "━╴╶╸╺╼╾",
    "│": "┃╵╷╹╻╽╿",
    "█": "▅▆▇▉▊▋▙▛▜▟",
    "▒": "▀▃▄▚▞",
    "-": "─┄┅┈┉╌╍▔‐‑‒–—―−",
    "|": "│║▌▍▎▏▐▕",
    ":": "┆┇┊┋╎╏░",
    "=": "═‖≠",
    "_": "▁▂",
    "#": "█■▪",
    "%": "▒◍",
    "@": "▓",
    "/": "╱✂÷",
    "\\": "╲",
    "X": "╳",
    "x": "✗✘×",
    "+": "✓✔◆◇",
    "*": "●★☆",
    "o": "○◦•",
    "~": "…≈±",
    "^": "↑▲△▴",
    "v": "↓▼▽▾",
    "<": "←◀◂≤",
    ">": "→▶▸≥",
    "S": "⇧",
    "R": "↻",
    ".": "◌·▖▗□▫",
    "'": "▘▝‘’",
    '"': "“”",
    " ": "°",
    # The icon of Textual's command palette.
    "> ": "🔎",
}
FALLBACKS = {chr(code): "+" for code in range(0x2500, 0x2580)}
FALLBACKS |= {character: written for written, characters in REPLACED.items() for character in characters}
BRAILLE = range(0x2800, 0x2900)
# Bits of the dots of a Braille character from the top down, left and right column (Unicode 15, section 21.1).
BRAILLE_COLUMNS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
CODEC_PREFIX = "gputrain_"
# Writes a question mark for each cell of what the encoding lacks: an escape takes up to ten cells.
CELLS_HANDLER = "gputrain_cells"

Drawable = Literal["ascii", "console", "encoded"]
"""What a terminal draws: ASCII alone, what the fonts of the Linux console have, or what its encoding has."""


class Characters(dict[int, str]):
    """For `str.translate`: what is written for each character, found when it is first needed."""

    def __init__(self, can_draw: Callable[[str], bool]) -> None:
        self._can_draw = can_draw

    def __missing__(self, code: int) -> str:
        written = chr(code)
        while not written.isascii() and not self._can_draw(written):
            if (fallback := _braille_fallback(written) or FALLBACKS.get(written)) is None:
                break
            written = fallback
        self[code] = written
        return written


def _braille_fallback(character: str) -> str | None:
    """Return what is about as high, as steep and as full as the dots of a Braille character; None for others."""
    if ord(character) not in BRAILLE:
        return None
    dots = ord(character) - BRAILLE.start
    left, right = ([row for row, bit in enumerate(column) if dots & bit] for column in BRAILLE_COLUMNS)
    rows = left + right
    if len(rows) >= 5 or not rows:
        return "█" if len(rows) >= 7 else "*" if rows else " "
    if len(rows) >= 3 and not (left and right):
        return "|"
    slope = sum(left) / len(left) - sum(right) / len(right) if left and right else 0.0
    if abs(slope) > 1:
        return "/" if slope > 0 else "\\"
    height = sum(rows) / len(rows)
    return "=" if len(rows) == 4 else "'" if height < 1 else "-" if height <= 2 else "_" if len(rows) > 1 else "."


def read_choice(variable: str, allowed: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the value of a variable that chooses what the terminal shows; None for `auto` or without it.

    Raises UsageError if it has another value than those `allowed`.
    """
    value = environment.get(variable, "").strip().lower() or "auto"
    if value == "auto" or value in allowed:
        return None if value == "auto" else value
    reason = f"{variable}={value} is ignored: it must be one of {', '.join(('auto', *allowed))}"
    raise UsageError.one("", reason, code="unknown-value")


def requested_characters(environment: Mapping[str, str]) -> str | None:
    """Return the value of `GPUTRAIN_CHARACTERS`; None for `auto`. Raises UsageError if it has another value."""
    return read_choice(CHARACTERS_VARIABLE, ("ascii", "utf-8"), environment)


def find_drawable(encoding: str, *, is_terminal: bool, environment: Mapping[str, str]) -> Drawable | None:
    """Return what can be drawn on a stream; None for everything that Unicode has."""
    try:
        requested = requested_characters(environment)
    except UsageError:
        requested = None
    if requested is not None:
        return "ascii" if requested == "ascii" else None
    term = environment.get("TERM", "") if is_terminal else ""
    if term in BASIC_TERMS and term != CONSOLE_TERM:
        return "ascii"
    if not encoding.lower().startswith("utf"):
        return "encoded"
    if term == CONSOLE_TERM:
        return "console"
    # Python writes UTF-8 in this locale, also where it was not told to.
    is_told = environment.get("PYTHONIOENCODING") or environment.get("PYTHONUTF8")
    return "ascii" if environment.get("LC_ALL") in ("C", "POSIX") and not is_told else None


def limit_characters(stream: object, errors: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Let a text stream replace what its terminal cannot draw, and escape what its encoding lacks.

    `errors` is the error handler of a stream that is limited, by default its own.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return
    drawable = find_drawable(stream.encoding, is_terminal=stream.isatty(), environment=environment)
    own_errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    if drawable is not None:
        stream.reconfigure(encoding=f"{CODEC_PREFIX}{drawable}_{stream.encoding}", errors=errors or own_errors)
    elif stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors=own_errors)
    else:
        stream.reconfigure(encoding="utf-8", errors=own_errors)


def _find_codec(name: str) -> codecs.CodecInfo | None:
    """Return the codec `gputrain_DRAWABLE_ENCODING`, which writes the replacements in that encoding."""
    if not name.startswith(CODEC_PREFIX):
        return None
    drawable, _, encoding = name.removeprefix(CODEC_PREFIX).partition("_")
    codec = codecs.lookup(encoding)
    characters = Characters(
        {
            "ascii": str.isascii,
            "console": CONSOLE_CHARACTERS.__contains__,
            # More bytes are wider characters in the terminals of these encodings.
            "encoded": lambda character: len(character.encode(encoding, "ignore")) == 1,
        }[drawable]
    )

    def encode(text: str, errors: str = "strict") -> tuple[bytes, int]:
        return codec.encode(text.translate(characters), errors)[0], len(text)

    class Encoder(codecs.IncrementalEncoder):
        def encode(self, text: str, final: bool = False) -> bytes:
            return encode(text, self.errors)[0]

    return codecs.CodecInfo(
        encode, codec.decode, incrementalencoder=Encoder, incrementaldecoder=codec.incrementaldecoder, name=name
    )


def _write_cells(error: UnicodeError) -> tuple[str, int]:
    from rich.cells import cell_len

    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "?" * cell_len(error.object[error.start : error.end]), error.end


codecs.register(_find_codec)
codecs.register_error(CELLS_HANDLER, _write_cells)
