"""A widget that shows a picture as large as it fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.text import Text
from textual.message import Message
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from engine.utils.text import printable
from tui.palette import MUTED, WARNING
from tui.pollers.picture import PictureReader, PictureRequest
from tui.pollers.watched import Watched
from tui.tables import wrap_text

if TYPE_CHECKING:
    from PIL.Image import Image

    from tui.pictures import DrawnPicture

# The picture before stays for so long while the next one is read: an empty frame in between would flicker.
STALE_SECONDS = 0.3


class Picture(Widget):
    """Shows the image given to `show`, which a thread reads and draws."""

    class Drawn(Message):
        """The picture, or why there is none, is shown."""

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002 (Textual's name)
        super().__init__(id=id)
        self._reader = PictureReader()
        self._poller = Watched("picture", self._reader.read, self._reader.stamp, interval_s=None)
        self._poller.on_poll = lambda: self.post_message(self.Drawn())
        self._shown: tuple[Hashable, Callable[[], Image]] | None = None
        self._request: PictureRequest | None = None
        self._picture: DrawnPicture | None = None
        self._message: list[Text] = []
        self._timer: Timer | None = None

    def on_mount(self) -> None:
        self._poller.start()

    def on_unmount(self) -> None:
        self._poller.close()

    @property
    def is_loading(self) -> bool:
        """Whether the image that `show` got is not drawn yet."""
        latest = self._poller.value
        return self._request is not None and (latest is None or latest.request.identity != self._request.identity)

    def show(self, key: Hashable, load: Callable[[], Image]) -> None:
        """Show the image that `load` returns. `key` identifies it; `load` is called in a thread, and may raise."""
        if self._shown is None or self._shown[0] != key:
            self._shown = (key, load)
            self._send_request()

    def show_nothing(self) -> None:
        """Show an empty frame."""
        if self._shown is not None:
            self._shown = None
            self._request_picture(None)
            self._replace(None)

    def on_resize(self) -> None:
        self._send_request()

    def _send_request(self) -> None:
        if self._shown is None or not self.size.width or not self.size.height:
            return
        key, load = self._shown
        self._request_picture(PictureRequest(key, load, self.size.width, self.size.height))
        if self._timer is None:
            self._timer = self.set_timer(STALE_SECONDS, self._drop_stale)

    def _request_picture(self, request: PictureRequest | None) -> None:
        self._request = self._reader.request = request
        self._poller.request_poll()

    def _drop_stale(self) -> None:
        self._timer = None
        if self.is_loading:
            self._replace(None, [Text("Loading …", MUTED)])

    def on_picture_drawn(self, message: Drawn) -> None:
        result = self._poller.value
        if result is None or self._request is None or result.request.identity != self._request.identity:
            return
        if result.picture is not None and result.picture is self._picture:
            # Another refresh would send it to the terminal again.
            return
        problem = wrap_text(Text(printable(str(result.problem)), WARNING), self.size.width) if result.problem else []
        self._replace(result.picture, problem)

    def _replace(self, picture: DrawnPicture | None, message: list[Text] | None = None) -> None:
        """Show a picture or a message."""
        self._picture, self._message = picture, message or []
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
