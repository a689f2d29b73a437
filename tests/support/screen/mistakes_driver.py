"""A run with an inspection of six photos, and the screen of its mistakes in a running app."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from PIL import Image
from textual.pilot import Pilot

from engine.runs.folder import RunFolder
from engine.runs.inspection import Inspection, write_inspection
from support.json_files import write_json
from support.runs.inspections import CLASSES, make_inspection
from support.screen.demo_app import demo_runs, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import press
from tui.screens.demo.server import FINISHED_RUN
from tui.screens.mistakes import MistakesScreen
from tui.screens.widgets.picture import PicturePanel

# Probabilities of cat, dog and owl, and the label.
IMAGES = [
    ((0.10, 0.90, 0.00), 0, "cat/tabby.png"),
    ((0.01, 0.98, 0.01), 0, "cat/a dog, really.png"),
    ((0.90, 0.05, 0.05), 0, "cat/siamese.png"),
    ((0.05, 0.90, 0.05), 1, "dog/pug.png"),
    ((0.30, 0.36, 0.34), 2, "owl/[red].png"),
    ((0.49, 0.00, 0.51), 2, "owl/barn.png"),
]
COUNTS = [[1, 2, 0], [0, 1, 0], [0, 1, 1]]


def photo_of(index: int) -> Image.Image:
    """Return a picture with a bright disk, at a place and in a color of its own."""
    y, x = np.mgrid[0:48, 0:64]
    disk = (x - 12 - 8 * index) ** 2 + (y - 24) ** 2 < 140
    colors = np.array([[230, 90 + 25 * index, 40], [30, 60, 60 + 30 * index]], np.uint8)
    return Image.fromarray(colors[(~disk).astype(int)])


def inspected_run(root: Path, photos: Path) -> RunFolder:
    """Create the runs of the demo. The finished one has an evaluation and an inspection of six photos."""
    demo_runs(root)[0].release()
    for index, (_, _, path) in enumerate(IMAGES):
        (photos / path).parent.mkdir(parents=True, exist_ok=True)
        photo_of(index).save(photos / path)
    run = RunFolder(root / FINISHED_RUN)
    result = {
        "epoch": 7, "loss": 0.9, "top1": 0.5, "top5": 1.0, "images": 6, "per_class": [1 / 3, 1.0, 0.5],
        "confusion": {"layout": "dense", "rows": COUNTS},
    }  # fmt: skip
    write_json(run.evaluation, {"format": 1, "classes": CLASSES, "last": result, "best": result})
    write_inspection(run, six_images(photos))
    return run


def six_images(photos: Path) -> Inspection:
    info = {"root": str(photos), "part": "val", "time": time.time() - 300}
    table, labels, paths = zip(*IMAGES, strict=True)
    return make_inspection(table, labels, paths=paths, info=info)


async def open_mistakes(pilot: Pilot[None], cell: tuple[str, str] = ("cat", "dog")) -> MistakesScreen:
    """Go from the screen of the run over the matrix to a cell."""
    await press(pilot, "v")
    await press(pilot, "home", *["down"] * CLASSES.index(cell[0]), *["right"] * CLASSES.index(cell[1]))
    assert "enter images" in visible_text(pilot, "Keys")
    await pilot.press("enter")
    screen = pilot.app.screen
    assert isinstance(screen, MistakesScreen)
    await wait_until(pilot, lambda: screen.inspection_poller.has_polled)
    await drawn(pilot)
    return screen


async def drawn(pilot: Pilot[None]) -> None:
    """Wait until list and picture are drawn."""
    for _ in range(2):
        await wait_until_idle(pilot)
    await wait_until(pilot, lambda: not pilot.app.screen.query_one(PicturePanel).is_loading)
    await pilot.pause()
