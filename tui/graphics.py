"""Which graphics the terminal can show: what the environment says, what to ask the terminal, and what it answers.

`tui.terminal_app` asks, `tui.pictures` draws. textual-image itself would ask when it is imported: it waits up to 0.1 s
for each answer, takes a key that is typed meanwhile, and leaves a later answer of a slow connection in the input.
"""

from __future__ import annotations

import fcntl
import re
import struct
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tui.characters import BASIC_TERMS, read_choice

Protocol = Literal["kitty", "sixel", "blocks"]
"""How pictures are drawn: Kitty graphics, Sixel (also iTerm2, Windows Terminal, VS Code), or half blocks of text."""
GRAPHICS_VARIABLE = "GPUTRAIN_GRAPHICS"
# A multiplexer answers for itself, passes pictures on only if it is configured to, and moves them with its panes.
MULTIPLEXER_VARIABLES = ("TMUX", "STY", "ZELLIJ")
MULTIPLEXER_TERMS = ("tmux", "screen")
KITTY_TERMS = ("xterm-kitty", "xterm-ghostty")
TEXT_TERMS = ("dumb", *BASIC_TERMS)
# That of the VT340, which textual-image assumes as well.
DEFAULT_CELL = (10, 20)
MAX_CELL_PIXELS = 200

ASK_ATTRIBUTES = "\x1b[c"
ASK_CELL_SIZE = "\x1b[16t"
KITTY_QUERY_ID = 4207
# One pixel, which the terminal checks and does not keep. The attributes are the end: every terminal answers them.
ASK_KITTY = f"\x1b_Gi={KITTY_QUERY_ID},s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\"
# Device attributes: the class of the terminal, then its extensions, of which 4 is Sixel.
ATTRIBUTES_REPLY = re.compile(r"\x1b\[\?(\d+(?:;\d*)*);?c")
CELL_SIZE_REPLY = re.compile(r"\x1b\[6;(\d{1,5});(\d{1,5})t")
KITTY_REPLY = re.compile(rf"\x1b_Gi={KITTY_QUERY_ID}[^;\x1b]*;([^\x1b]*)\x1b\\")
SIXEL_EXTENSION = 4
REPLY = re.compile("|".join(f"(?:{reply.pattern})" for reply in (ATTRIBUTES_REPLY, CELL_SIZE_REPLY, KITTY_REPLY)))
# The beginning of an answer at the end of what has arrived; the rest follows. Longer than any answer, it is none.
PARTIAL_REPLY = re.compile(r"\x1b(?:\[(?:\?[\d;]*|6(?:;[\d;]*)?)?|_(?:G[^\x1b]*\x1b?)?)?\Z")
MAX_REPLY_CHARACTERS = 200
# Terminals below print the characters of a sequence that they do not know.
MIN_CLASS_FOR_KITTY_QUERY = 60


@dataclass(frozen=True)
class Graphics:
    """How to draw pictures. `cell` is the width and height of a character cell in pixels."""

    protocol: Protocol = "blocks"
    cell: tuple[int, int] = DEFAULT_CELL


def requested_protocol(environment: Mapping[str, str]) -> Protocol | None:
    """Return the value of `GPUTRAIN_GRAPHICS`; None for `auto` or without it.

    Raises UsageError if it has another value.
    """
    return read_choice(GRAPHICS_VARIABLE, get_args(Protocol), environment)  # type: ignore[return-value]


def known_protocol(environment: Mapping[str, str]) -> Protocol | None:
    """Return what the environment says about the terminal; None if only the terminal itself knows."""
    term = environment.get("TERM", "dumb")
    if any(environment.get(name) for name in MULTIPLEXER_VARIABLES) or term.startswith(MULTIPLEXER_TERMS):
        return "blocks"
    if term in KITTY_TERMS:
        return "kitty"
    if term in TEXT_TERMS or environment.get("TERM_PROGRAM") == "Apple_Terminal":
        return "blocks"
    return None


def cell_size(fd: int) -> tuple[int, int] | None:
    """Return the width and height of a cell in pixels, as the kernel knows them; None if it does not."""
    try:
        size = fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
    except OSError:
        return None
    rows, columns, width, height = struct.unpack("HHHH", size)
    if not (rows and columns and width and height):
        return None
    return _valid_cell(width // columns, height // rows)


def _valid_cell(width: int, height: int) -> tuple[int, int] | None:
    return (width, height) if 0 < width <= MAX_CELL_PIXELS and 0 < height <= MAX_CELL_PIXELS else None


class GraphicsQuery:
    """The questions to one terminal, and what is known of its graphics so far.

    `question` is the first question, "" if all is known. `cell` is the size of a cell, None if it is not known.
    """

    def __init__(self, protocol: Protocol | None, cell: tuple[int, int] | None) -> None:
        self.graphics = Graphics(protocol or "blocks", cell or DEFAULT_CELL)
        # Half blocks look right with the usual size, too.
        needs_cell = cell is None and protocol != "blocks"
        self.question = (ASK_CELL_SIZE if needs_cell else "") + (ASK_ATTRIBUTES if protocol is None else "")

    def take(self, reply: str) -> str:
        """Take an answer, and return the next question; "" if there is none."""
        if (match := CELL_SIZE_REPLY.fullmatch(reply)) is not None:
            height, width = map(int, match.groups())
            self.graphics = replace(self.graphics, cell=_valid_cell(width, height) or self.graphics.cell)
        elif (match := KITTY_REPLY.fullmatch(reply)) is not None:
            if match[1] == "OK":
                self.graphics = replace(self.graphics, protocol="kitty")
        elif (match := ATTRIBUTES_REPLY.fullmatch(reply)) is not None:
            terminal_class, *extensions = (int(number or 0) for number in match[1].split(";"))
            if SIXEL_EXTENSION in extensions:
                # Konsole and WezTerm answer both, and draw only Sixel where text is placed over pictures.
                self.graphics = replace(self.graphics, protocol="sixel")
            elif terminal_class >= MIN_CLASS_FOR_KITTY_QUERY:
                return ASK_KITTY
        return ""


class ReplyFilter:
    """Takes the answers of the terminal out of what is typed. An answer may arrive in pieces."""

    def __init__(self, on_reply: Callable[[str], object]) -> None:
        self._on_reply = on_reply
        self._held, self._held_since = "", 0.0

    def feed(self, data: str) -> str:
        """Return what is typed; the beginning of an answer is held until its end arrives."""
        data, self._held = self._held + data, ""
        typed, position = [], 0
        for match in REPLY.finditer(data):
            typed.append(data[position : match.start()])
            position = match.end()
            self._on_reply(match[0])
        rest = data[position:]
        partial_reply = PARTIAL_REPLY.search(rest)
        if partial_reply is not None and len(partial_reply[0]) <= MAX_REPLY_CHARACTERS:
            rest, self._held, self._held_since = rest[: partial_reply.start()], partial_reply[0], time.monotonic()
        return "".join([*typed, rest])

    @property
    def holds(self) -> bool:
        """Whether the beginning of an answer is held."""
        return bool(self._held)

    def release(self, after_s: float) -> str:
        """Return what has been held for `after_s` seconds: an escape key, and no answer."""
        if not self._held or time.monotonic() - self._held_since < after_s:
            return ""
        held, self._held = self._held, ""
        return held
