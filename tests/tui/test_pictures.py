"""Drawing images with the graphics of a terminal, and the thread that draws them."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image
from textual.strip import Strip

from support.gputrain_command import wait_for
from support.messages import has_problem
from tui.graphics import Graphics, Protocol
from tui.pictures import draw_picture, fit_picture
from tui.pollers.picture import PictureReader, PictureRequest, PictureResult
from tui.pollers.watched import Watched

BLOCKS, KITTY, SIXEL = Graphics(), Graphics("kitty"), Graphics("sixel")


def halves(size: tuple[int, int] = (300, 200)) -> Image.Image:
    """Return an image whose upper half is red and whose lower half is blue."""
    image = Image.new("RGB", size, "red")
    image.paste("blue", (0, size[1] // 2, *size))
    return image


def test_fit_picture_keeps_proportions_within_room() -> None:
    for graphics in (BLOCKS, KITTY, SIXEL):
        wide = fit_picture(3000, 1000, 40, 20, graphics)
        assert (wide.columns, wide.rows) == (40, 7)
        high = fit_picture(100, 4000, 40, 20, graphics)
        assert (high.columns, high.rows) == (1, 20)
    assert (wide.width, wide.height) == (400, 140)


def test_fit_picture_enlarges_small_images_by_whole_pixels() -> None:
    digit = fit_picture(8, 8, 36, 18, BLOCKS)
    assert (digit.columns, digit.rows, digit.width, digit.height, digit.is_smooth) == (32, 16, 32, 32, False)
    odd = fit_picture(5, 5, 36, 18, BLOCKS)
    assert (odd.columns, odd.rows, odd.height) == (35, 18, 35)
    # Without room for all pixels, or with narrow cells, the image is resized.
    assert fit_picture(64, 64, 36, 18, BLOCKS).is_smooth
    assert fit_picture(8, 8, 36, 18, Graphics(cell=(6, 20))).is_smooth


@pytest.mark.parametrize("protocol", ["kitty", "sixel"])
def test_fit_picture_bounds_pixels_of_large_terminal(protocol: Protocol) -> None:
    size = fit_picture(4000, 4000, 200, 100, Graphics(protocol, (20, 40)))
    assert max(size.width, size.height) <= 660
    assert (size.columns < 40) is (protocol == "sixel")


def test_half_blocks_have_colors_of_image() -> None:
    drawn = draw_picture(halves(), 36, 18, BLOCKS)
    assert (drawn.columns, drawn.rows, drawn.setup, drawn.overlay) == (36, 12, "", "")
    assert [Strip(line).cell_length for line in drawn.lines] == [36] * 12
    first, last = drawn.lines[0][0], drawn.lines[-1][-1]
    assert first.text == "▀" * 36
    assert first.style is not None and first.style.color is not None and first.style.color.triplet is not None
    assert first.style.color.triplet.hex == "#ff0000"
    assert last.style is not None and last.style.bgcolor is not None and last.style.bgcolor.triplet is not None
    assert last.style.bgcolor.triplet.hex == "#0000ff"


def test_kitty_picture_is_sent_as_png_with_placeholders() -> None:
    drawn = draw_picture(halves(), 36, 18, KITTY)
    chunks = re.findall(r"\x1b_Gi=(\d+),m=[01],f=100,q=2;([^\x1b]*)\x1b\\", drawn.setup)
    sent = Image.open(io.BytesIO(base64.b64decode("".join(payload for _, payload in chunks))))
    assert (sent.size, sent.getpixel((0, 0)), sent.getpixel((359, 239))) == ((360, 240), (255, 0, 0), (0, 0, 255))
    assert f"a=p,i={chunks[0][0]},c=36,r=12,U=1" in drawn.setup
    assert [Strip(line).cell_length for line in drawn.lines] == [36] * 12
    assert drawn.cleanup == f"\x1b_Ga=d,d=I,i={chunks[0][0]},q=2\x1b\\"


def test_sixel_picture_has_pixels_of_its_cells() -> None:
    drawn = draw_picture(halves(), 36, 18, Graphics("sixel", (9, 18)))
    assert (drawn.columns, drawn.rows) == (36, 12)
    assert drawn.overlay.startswith("\x1bP") and drawn.overlay.endswith("\x1b\\")
    assert '"1;1;324;216' in drawn.overlay
    assert {line[0].text for line in drawn.lines} == {" " * 36}


def test_drawing_asks_terminal_nothing() -> None:
    """textual-image would write a question to a terminal when it is imported, and read the answer."""
    program = (
        "import os, pty, select, sys\n"
        "master, slave = pty.openpty()\n"
        "os.dup2(slave, 0), os.dup2(slave, 1)\n"
        "sys.__stdout__ = sys.stdout = open(1, 'w', closefd=False)\n"
        "from PIL import Image\n"
        "from tui.graphics import Graphics\n"
        "from tui.pictures import draw_picture\n"
        "assert sys.__stdout__.isatty()\n"
        "for protocol in ('blocks', 'kitty', 'sixel'):\n"
        "    draw_picture(Image.new('RGB', (40, 40)), 10, 5, Graphics(protocol))\n"
        "sys.exit(str(select.select([master], [], [], 0)[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "[]"


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
        return PictureRequest(name, lambda: load(name), 10, 5, BLOCKS)

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
    reader.request = PictureRequest("a", lambda: Image.open(tmp_path / "gone.png"), 10, 5, BLOCKS)
    poller.start()
    assert published.wait(20)
    assert poller.value is not None and poller.value.picture is None
    assert poller.value.problem is not None
    assert has_problem([poller.value.problem], "not-readable", "", "No such file")
    poller.close()
