"""Reads and draws the picture that was requested last, in a thread for `tui.widgets.picture`.

Requests that arrive while it reads replace each other: a list that is scrolled quickly leaves no queue of pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.utils.errors import CodedError, Problem

if TYPE_CHECKING:
    from PIL.Image import Image

    from tui.pictures import DrawnPicture

# Images that were shown before appear at once; one of them takes at most 3 MiB.
MAX_IMAGES = 16


@dataclass(frozen=True)
class PictureRequest:
    """An image by its key, how to read it, and the cells to draw it in.

    `load` raises an exception whose message is one sentence.
    """

    key: Hashable
    load: Callable[[], Image]
    columns: int
    rows: int

    @property
    def identity(self) -> tuple[object, ...]:
        """What the result depends on."""
        return self.key, self.columns, self.rows


@dataclass(frozen=True)
class PictureResult:
    """A drawn picture, or the problem that prevents it. `width` and `height` are those of the image in pixels."""

    request: PictureRequest
    picture: DrawnPicture | None = None
    problem: Problem | None = None


class PictureReader:
    """Reads and draws the picture of the latest `request`. It runs in the thread of a `Watched` without an interval."""

    def __init__(self) -> None:
        self.request: PictureRequest | None = None
        """The picture to draw next. Another request replaces it while it is not begun."""
        self._begun: PictureRequest | None = None
        self._images: dict[Hashable, Image] = {}

    def stamp(self) -> tuple[object, ...] | None:
        """Return what the result depends on; None without a request."""
        self._begun = self.request
        return None if self._begun is None else self._begun.identity

    def read(self) -> PictureResult | None:
        """Draw the requested picture."""
        return None if self._begun is None else self._draw(self._begun)

    def _draw(self, request: PictureRequest) -> PictureResult:
        # Imports Pillow, which no other screen needs.
        from tui.pictures import draw_picture

        try:
            image = self._images.pop(request.key, None)
            if image is None:
                image = request.load().convert("RGB")
            self._images[request.key] = image
            while len(self._images) > MAX_IMAGES:
                del self._images[next(iter(self._images))]
            return PictureResult(request, draw_picture(image, request.columns, request.rows))
        except Exception as error:
            # Any error is shown in place of the picture; the next one may be readable.
            code = error.code if isinstance(error, CodedError) else "not-readable"
            return PictureResult(request, problem=Problem("", str(error) or type(error).__name__, code=code))
