"""A Textual driver that can ask the terminal something while the screen is shown, and keeps the answer from the keys.

Textual takes an answer that it does not know for typed text: the letters of `ESC [ ? 6 2 ; 4 c` would be pressed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import constants
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver

from tui.graphics import ATTRIBUTES_REPLY, CELL_SIZE_REPLY, KITTY_REPLY

if TYPE_CHECKING:
    from textual.message import Message

REPLY = re.compile("|".join(f"(?:{reply.pattern})" for reply in (ATTRIBUTES_REPLY, CELL_SIZE_REPLY, KITTY_REPLY)))
# The beginning of an answer at the end of what has arrived; the rest follows. Longer than any answer, it is none.
PARTIAL_REPLY = re.compile(r"\x1b(?:\[(?:\?[\d;]*|6(?:;[\d;]*)?)?|_(?:G[^\x1b]*\x1b?)?)?\Z")
MAX_REPLY_CHARACTERS = 200


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

    def release(self, after_s: float) -> str:
        """Return what has been held for `after_s` seconds: an escape key, and no answer."""
        if not self._held or time.monotonic() - self._held_since < after_s:
            return ""
        held, self._held = self._held, ""
        return held


class ReplyParser(XTermParser):
    """Textual's parser of the keys, behind a filter while answers are expected."""

    def __init__(self, find_filter: Callable[[], ReplyFilter | None], debug: bool = False) -> None:
        self._find_filter = find_filter
        super().__init__(debug)

    def feed(self, data: str) -> Iterable[Message]:
        replies = self._find_filter()
        typed = replies.feed(data) if replies is not None else data
        # To Textual, an empty text is the end of the input.
        if typed or not data:
            yield from super().feed(typed)

    def tick(self) -> Iterable[Message]:
        replies = self._find_filter()
        if replies is not None and (held := replies.release(constants.ESCAPE_DELAY)):
            yield from super().feed(held)
        yield from super().tick()


class AskingDriver(linux_driver.LinuxDriver):
    """The driver of Textual on Linux, with `ask`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._replies: ReplyFilter | None = None
        self._lock = threading.Lock()

    def ask(self, question: str, on_reply: Callable[[str], object]) -> None:
        """Send a question. `on_reply` gets each answer in the thread that reads the keys, however late it comes."""
        with self._lock:
            if self._replies is None:
                self._replies = ReplyFilter(on_reply)
        self.write(question)

    def run_input_thread(self) -> None:
        # Textual has no parameter for its parser.
        linux_driver.XTermParser = partial(ReplyParser, lambda: self._replies)  # type: ignore[assignment, misc]
        super().run_input_thread()
