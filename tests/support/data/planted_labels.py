"""Write photos of shapes, with some of them in the folder of another class."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

SHAPES = ("cross", "disk", "ring", "square", "triangle")
SIDE = 40


def write_photos_with_wrong_labels(root: Path, seed: int, count: int = 1000, wrong: int = 20) -> set[str]:
    """Write `count` photos to one folder per class. Return the paths, relative to `root`, of `wrong` that show another.

    Shapes differ in size, angle, color and place, on a dark background with noise; lines cover part of some.
    """
    rng = np.random.default_rng(seed)
    planted = set(rng.choice(count, wrong, replace=False).tolist())
    wrong_paths = set[str]()
    for number in range(count):
        shape = number % len(SHAPES)
        label = (shape + int(rng.integers(1, len(SHAPES)))) % len(SHAPES) if number in planted else shape
        path = root / SHAPES[label] / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(SHAPES[shape], rng).save(path, quality=85)
        if number in planted:
            wrong_paths.add(f"{SHAPES[label]}/{path.name}")
    return wrong_paths


def _draw(shape: str, rng: np.random.Generator) -> Image.Image:
    background, color = rng.integers(20, 90, 3), rng.integers(150, 256, 3)
    noise = rng.normal(0, 15, (SIDE, SIDE, 3)) + background
    photo = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(photo)
    center, radius, angle = rng.uniform(17, 23, 2), rng.uniform(9, 14), rng.normal(0.25 * math.pi, 0.15)
    fill = tuple(int(value) for value in color)
    if shape in ("disk", "ring"):
        box = [*(center - radius), *(center + radius)]
        draw.ellipse(box, fill=fill if shape == "disk" else None, outline=fill, width=4)
    elif shape == "cross":
        for turn in (0, math.pi / 2):
            ends = _corners(center, radius, angle + turn, 2)
            draw.line([*ends[0], *ends[1]], fill=fill, width=5)
    else:
        corners = _corners(center, radius, angle, 3 if shape == "triangle" else 4)
        draw.polygon([tuple(corner) for corner in corners], fill=fill)
    for _ in range(int(rng.integers(0, 3))):
        line = tuple(int(value) for value in rng.integers(20, 200, 3))
        draw.line([*rng.uniform(0, SIDE, 4)], fill=line, width=int(rng.integers(1, 4)))
    return photo.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1.0))))


def _corners(center: NDArray[np.float64], radius: float, angle: float, count: int) -> NDArray[np.float64]:
    angles = angle + 2 * math.pi * np.arange(count) / count
    return center + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
