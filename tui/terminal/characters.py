"""Whether the terminal draws ASCII alone, and what is written in place of other characters: one table for all output.

The entry points pass stdout and stderr to `limit_characters`, and `tui.cli.open_tui` the stream of the screen. A
replacement is as wide as what it replaces, so columns stay where they are. Characters that the table does not have,
such as those of names, are up to the encoding.
"""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Mapping

from engine.base.errors import UsageError

CHARACTERS_VARIABLE, CHOICES = "GPUTRAIN_CHARACTERS", ("auto", "ascii", "utf-8")
# Terminals with 16 colors at most, also where a login from another terminal has left COLORTERM behind.
BASIC_TERMS = ("linux", "vt100", "vt220", "ansi", "cons25", "eterm")
# What is written in place of each of these characters.
REPLACED = {
    "-": "◐─━╴╶╸╺╼╾┄┅┈┉╌╍▔‐‑‒–—―−",
    "|": "│┃╵╷╹╻╽╿║▌▍▎▏▐▕",
    ":": "┆┇┊┋╎╏░",
    "=": "═‖≠",
    "_": "▁▂",
    "#": "█▅▆▇▉▊▋▙▛▜▟■▪",
    "%": "▒▀▃▄▚▞◍",
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
# Bits of the dots of a Braille character from the top down, left and right column (Unicode 15, section 21.1).
BRAILLE_COLUMNS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
CODEC_PREFIX = "gputrain_"


def _braille_fallback(dots: int) -> str:
    """Return what is about as high, as steep and as full as the dots of a Braille character."""
    left, right = ([row for row, bit in enumerate(column) if dots & bit] for column in BRAILLE_COLUMNS)
    rows = left + right
    if len(rows) >= 5 or not rows:
        return "#" if len(rows) >= 7 else "*" if rows else " "
    if len(rows) >= 3 and not (left and right):
        return "|"
    slope = sum(left) / len(left) - sum(right) / len(right) if left and right else 0.0
    if abs(slope) > 1:
        return "/" if slope > 0 else "\\"
    height = sum(rows) / len(rows)
    return "=" if len(rows) == 4 else "'" if height < 1 else "-" if height <= 2 else "_" if len(rows) > 1 else "."


def requested_characters(environment: Mapping[str, str]) -> str | None:
    """Return the value of `GPUTRAIN_CHARACTERS`; None for `auto`. Raises UsageError if it has another value."""
    value = environment.get(CHARACTERS_VARIABLE, "").strip().lower() or "auto"
    if value not in CHOICES:
        reason = f"{CHARACTERS_VARIABLE}={value} is ignored: it must be one of {', '.join(CHOICES)}"
        raise UsageError.one("", reason, code="unknown-value")
    return None if value == "auto" else value


def draws_ascii(encoding: str, *, is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether a stream draws ASCII alone, and not everything that Unicode has."""
    try:
        requested = requested_characters(environment)
    except UsageError:
        requested = None
    if requested is not None:
        return requested == "ascii"
    if not encoding.lower().startswith("utf") or (is_terminal and environment.get("TERM") in BASIC_TERMS):
        return True
    # Python writes UTF-8 in this locale, also where it was not told to.
    is_told = environment.get("PYTHONIOENCODING") or environment.get("PYTHONUTF8")
    return environment.get("LC_ALL") in ("C", "POSIX") and not is_told


def limit_characters(stream: object, errors: str = "", environment: Mapping[str, str] = os.environ) -> None:
    """Let a text stream replace what its terminal cannot draw, and escape what its encoding lacks.

    `errors` is the error handler of a stream that is limited, by default its own.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return
    is_ascii = draws_ascii(stream.encoding, is_terminal=stream.isatty(), environment=environment)
    own_errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    if is_ascii:
        stream.reconfigure(encoding=f"{CODEC_PREFIX}{stream.encoding}", errors=errors or own_errors)
    elif stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors=own_errors)
    else:
        stream.reconfigure(encoding="utf-8", errors=own_errors)


def _find_codec(name: str) -> codecs.CodecInfo | None:
    """Return the codec `gputrain_ENCODING`, which writes the replacements in that encoding."""
    if not name.startswith(CODEC_PREFIX):
        return None
    codec = codecs.lookup(name.removeprefix(CODEC_PREFIX))
    written = str.maketrans(FALLBACKS)

    def encode(text: str, errors: str = "strict") -> tuple[bytes, int]:
        return codec.encode(text.translate(written), errors)[0], len(text)

    class Encoder(codecs.IncrementalEncoder):
        def encode(self, text: str, final: bool = False) -> bytes:
            return encode(text, self.errors)[0]

    return codecs.CodecInfo(
        encode, codec.decode, incrementalencoder=Encoder, incrementaldecoder=codec.incrementaldecoder, name=name
    )


FALLBACKS |= {chr(0x2800 + dots): _braille_fallback(dots) for dots in range(256)}
codecs.register(_find_codec)
