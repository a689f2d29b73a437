"""Drawing images in half blocks, and the widget whose thread draws them."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from PIL import Image
from textual.app import App, ComposeResult
from textual.strip import Strip

from support.screen.demo_app import wait_until
from tui.screens.widgets.picture import PicturePanel
from tui.terminal.pictures import draw_picture, fit_picture


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


class PictureApp(App[None]):
    """A picture alone, in a frame of fixed size."""

    CSS = "PicturePanel { width: 10; height: 5; }"

    def compose(self) -> ComposeResult:
        yield PicturePanel()


def test_picture_skips_images_that_were_scrolled_past() -> None:
    loaded: list[str] = []
    first_is_loading, may_continue = threading.Event(), threading.Event()

    def load(name: str) -> Image.Image:
        loaded.append(name)
        first_is_loading.set()
        assert may_continue.wait(20)
        return halves()

    async def scroll() -> None:
        async with PictureApp().run_test() as pilot:
            picture = pilot.app.query_one(PicturePanel)
            picture.show("a", partial(load, "a"))
            await wait_until(pilot, first_is_loading.is_set)
            for name in "bcdefg":
                picture.show(name, partial(load, name))
            may_continue.set()
            await wait_until(pilot, lambda: not picture.is_loading)

    asyncio.run(scroll())
    assert loaded == ["a", "g"]
