"""A Textual driver that can ask the terminal something while the screen is shown, and keeps the answer from the keys.

Textual takes an answer that it does not know for typed text: the letters of `ESC [ ? 6 2 ; 4 c` would be pressed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from textual import constants
from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver

if TYPE_CHECKING:
    from textual.message import Message

    from tui.graphics import ReplyFilter


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
        # The first frame does without it.
        from tui.graphics import ReplyFilter

        with self._lock:
            if self._replies is None:
                self._replies = ReplyFilter(on_reply)
        self.write(question)

    def run_input_thread(self) -> None:
        # Textual has no parameter for its parser.
        linux_driver.XTermParser = partial(ReplyParser, lambda: self._replies)  # type: ignore[assignment, misc]
        super().run_input_thread()
