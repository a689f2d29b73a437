"""Drawing images in half blocks, and the thread that draws them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from PIL import Image
from textual.strip import Strip

from support.gputrain_command import wait_for
from support.messages import has_problem
from tui.pictures import draw_picture, fit_picture
from tui.pollers.picture import PictureReader, PictureRequest, PictureResult
from tui.pollers.watched import Watched


def halves(size: tuple[int, int] = (300, 200)) -> Image.Image:
    """Return an image whose upper half is red and whose lower half is blue."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (0, size[1] // 2, *size))
    return image


@pytest.mark.parametrize(
    ("size", "fitted"),
    [
        ((3000, 1000), (40, 14, True)),
        ((100, 4000), (1, 40, True)),
        ((8, 8), (40, 40, False)),
        ((5, 3), (40, 24, False)),
        ((64, 64), (40, 40, True)),
    ],
)
def test_fit_picture_keeps_proportions_and_enlarges_small_images_by_whole_pixels(
    size: tuple[int, int], fitted: tuple[int, int, bool]
) -> None:
    assert fit_picture(*size, 40, 20) == fitted


def test_half_blocks_have_colors_of_image() -> None:
    drawn = draw_picture(halves(), 36, 18)
    assert [Strip(line).cell_length for line in drawn.lines] == [drawn.columns] * 12 == [36] * 12
    first, last = drawn.lines[0][0], drawn.lines[-1][-1]
    assert first.text == "▀" * 36
    assert first.style is not None and first.style.color is not None and first.style.color.triplet is not None
    assert first.style.color.triplet.hex == "#ff0000"
    assert last.style is not None and last.style.bgcolor is not None and last.style.bgcolor.triplet is not None
    assert last.style.bgcolor.triplet.hex == "#0000ff"


def watch_pictures(published: threading.Event) -> tuple[PictureReader, Watched[PictureResult]]:
    reader = PictureReader()
    poller = Watched("picture", reader.read, reader.stamp, interval_s=None)
    poller.on_poll = published.set
    return reader, poller


def test_picture_poller_skips_pictures_that_were_scrolled_past() -> None:
    loaded: list[str] = []
    first_is_loading, may_continue, published = threading.Event(), threading.Event(), threading.Event()

    def load(name: str) -> Image.Image:
        loaded.append(name)
        first_is_loading.set()
        assert may_continue.wait(20)
        return halves()

    def request(name: str) -> PictureRequest:
        return PictureRequest(name, lambda: load(name), 10, 5)

    reader, poller = watch_pictures(published)
    reader.request = request("a")
    poller.start()
    assert first_is_loading.wait(20)
    for name in "bcdefg":
        reader.request = request(name)
        poller.request_poll()
    may_continue.set()
    wait_for(lambda: poller.value is not None and poller.value.request.key == "g", "the last picture", 20)
    assert loaded == ["a", "g"]
    # An image that was shown before is not read again.
    published.clear()
    reader.request = request("a")
    poller.request_poll()
    wait_for(lambda: poller.value is not None and poller.value.request.key == "a", "the first picture", 20)
    assert loaded == ["a", "g"]
    poller.close()


def test_picture_poller_reports_image_that_cannot_be_read(tmp_path: Path) -> None:
    published = threading.Event()
    reader, poller = watch_pictures(published)
    reader.request = PictureRequest("a", lambda: Image.open(tmp_path / "gone.png"), 10, 5)
    poller.start()
    assert published.wait(20)
    assert poller.value is not None and poller.value.picture is None
    assert poller.value.problem is not None
    assert has_problem([poller.value.problem], "not-readable", "", "No such file")
    poller.close()
