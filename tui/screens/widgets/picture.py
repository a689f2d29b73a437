"""A widget that shows a picture as large as it fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.text import Text
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from engine.base.errors import CodedError, Problem
from engine.base.text import printable
from tui.screens.pollers.watched import Watched
from tui.screens.tables import wrap_text
from tui.terminal.palette import MUTED, WARNING

if TYPE_CHECKING:
    from PIL.Image import Image

    from tui.terminal.pictures import DrawnPicture

# The picture before stays for so long while the next one is read: an empty frame in between would flicker.
STALE_SECONDS = 0.3


@dataclass(frozen=True)
class PictureRequest:
    """An image by its key, how to read it, and the cells to draw it in; then what is drawn, or why that is nothing.

    `load` raises an exception whose message is one sentence.
    """

    key: Hashable
    load: Callable[[], Image]
    size: Size
    picture: DrawnPicture | None = None
    problem: Problem | None = None

    @property
    def identity(self) -> tuple[Hashable, Size]:
        """What the result depends on."""
        return self.key, self.size

    def draw(self) -> PictureRequest:
        """Return the request with its picture. Reads the image."""
        # Imports Pillow, which no other screen needs.
        from tui.terminal.pictures import draw_picture

        try:
            return replace(self, picture=draw_picture(self.load().convert("RGB"), *self.size))
        except Exception as error:
            # Any error is shown in place of the picture; the next one may be readable.
            code = error.code if isinstance(error, CodedError) else "not-readable"
            return replace(self, problem=Problem("", str(error) or type(error).__name__, code=code))


class PicturePanel(Widget):
    """Shows the image given to `show`, which a thread reads and draws.

    Images that are shown while it reads replace each other: a list that is scrolled quickly leaves no queue of them.
    """

    class Drawn(Message):
        """The picture, or why there is none, is known."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._poller = Watched("picture", self._read, self._begin, interval_s=None)
        self._poller.on_poll = lambda: self.post_message(self.Drawn())
        self._request: PictureRequest | None = None
        self._begun: PictureRequest | None = None
        """The request that the thread reads, or has read last."""
        self._picture: DrawnPicture | None = None
        self._message: list[Text] = []

    def on_mount(self) -> None:
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.close()

    def _begin(self) -> Hashable:
        self._begun = self._request
        return None if self._begun is None else self._begun.identity

    def _read(self) -> PictureRequest | None:
        return None if self._begun is None else self._begun.draw()

    @property
    def is_loading(self) -> bool:
        """Whether the image that `show` got is not drawn yet."""
        latest = self._poller.value
        return self._request is not None and (latest is None or latest.identity != self._request.identity)

    def show(self, key: Hashable, load: Callable[[], Image]) -> None:
        """Show the image that `load` returns. `key` identifies it; `load` is called in a thread, and may raise."""
        request = PictureRequest(key, load, self.size)
        if self._request is None or self._request.identity != request.identity:
            self._request = request
            if all(self.size):
                self._poller.request_poll()
                self.set_timer(STALE_SECONDS, self._drop_stale)

    def show_nothing(self) -> None:
        """Show an empty frame."""
        self._request = None
        self._replace(None, [])

    def on_resize(self) -> None:
        if self._request is not None:
            self.show(self._request.key, self._request.load)

    def _drop_stale(self) -> None:
        if self.is_loading:
            self._replace(None, [Text("Loading …", MUTED)])

    def on_picture_panel_drawn(self) -> None:
        if not self.is_loading and (result := self._poller.value) is not None:
            problem = Text(printable(str(result.problem or "")), WARNING)
            self._replace(result.picture, wrap_text(problem, self.size.width))

    def _replace(self, picture: DrawnPicture | None, message: list[Text]) -> None:
        # Another refresh would send the same picture to the terminal again.
        if picture is not self._picture or message != self._message:
            self._picture, self._message = picture, message
            self.refresh()

    def render_line(self, y: int) -> Strip:
        width, base, picture = self.size.width, self.rich_style, self._picture
        if picture is not None and y < len(picture.lines) and picture.columns <= width:
            left = (width - picture.columns) // 2
            right = width - left - picture.columns
            cells = Segment.apply_style(picture.lines[y], base)
            return Strip([Segment(" " * left, base), *cells, Segment(" " * right, base)], width)
        if picture is None and y < len(self._message):
            strip = Strip(self._message[y].render(self.app.console))
            return Strip(Segment.apply_style(strip, base)).adjust_cell_length(width, base)
        return Strip.blank(width, base)
