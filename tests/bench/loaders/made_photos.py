"""Made-up photos that compress like photographs, in the formats that the loaders of `tests/bench/input.py` read.

A photo is noise with the amplitude spectrum of natural scenes (1/f^1.2; Field 1987), of varying contrast, mostly in
brightness, with some shapes that have hard edges.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from task import Task

REPOSITORY = Path(__file__).resolve().parents[3]
WIDTH, HEIGHT, QUALITY, CLASSES, SHARDS = 500, 375, 90, 10, 3
MAX_SIDE = 500
FIELD_SIDE, NUM_FIELDS, SPECTRUM_EXPONENT = 1024, 8, 1.2
CONTRAST, COLOR_SHARE, MAX_SHAPES = (15.0, 55.0), 0.25, 6


def noise_field(rng: np.random.Generator) -> NDArray[np.float32]:
    """Return noise with a power-law spectrum and unit variance, 3 x side x side."""
    spectrum = np.fft.rfft2(rng.standard_normal((3, FIELD_SIDE, FIELD_SIDE)))
    frequency = np.hypot(np.fft.fftfreq(FIELD_SIDE)[:, None], np.fft.rfftfreq(FIELD_SIDE)[None])
    frequency[0, 0] = 1
    noise = np.fft.irfft2(spectrum / frequency**SPECTRUM_EXPONENT, s=(FIELD_SIDE, FIELD_SIDE))
    return (noise / noise.std()).astype(np.float32)


def make_photo(rng: np.random.Generator, fields: list[NDArray[np.float32]]) -> bytes:
    """Return one JPEG file."""
    field = fields[rng.integers(len(fields))]
    top, left = rng.integers(FIELD_SIDE - HEIGHT), rng.integers(FIELD_SIDE - WIDTH)
    noise = field[:, top : top + HEIGHT, left : left + WIDTH]
    pixels = rng.uniform(90, 165) + rng.uniform(*CONTRAST) * (noise[:1] + COLOR_SHARE * noise)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
    shapes = image.copy()
    draw = ImageDraw.Draw(shapes)
    for _ in range(rng.integers(MAX_SHAPES)):
        corners = rng.integers(0, (WIDTH, HEIGHT), (2, 2))
        color = tuple(map(int, rng.integers(0, 256, 3)))
        outline = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        outline([*map(int, corners.min(0)), *map(int, corners.max(0))], fill=color)
    # The texture stays visible through a shape, as on a surface.
    image = Image.blend(image, shapes, 0.6)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def make_photos(task: Task, count: int) -> None:
    """Write the photos as a folder, as WebDataset shards and, where their programs are installed, packed."""
    if not task.folder.exists():
        rng = np.random.default_rng(0)
        fields = [noise_field(rng) for _ in range(NUM_FIELDS)]
        for number in range(count):
            path = task.folder / f"class-{number % CLASSES}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make_photo(rng, fields))
    files = task.files()
    for shard in range(SHARDS):
        path = Path(task.tar.replace("{000..002}", f"{shard:03d}"))
        if not path.exists():
            _write_shard(path, files[shard::SHARDS])
    if not task.packed.exists():
        command = [sys.executable, "-c", "from tui import main; main()", "data", "pack", task.folder, "-o", task.packed]
        subprocess.run([*command, "--max-side", str(MAX_SIDE)], capture_output=True, cwd=REPOSITORY)


def _write_shard(path: Path, files: list[Path]) -> None:
    with tarfile.open(path, "w") as tar:
        for file in files:
            _add(tar, file.name, file.read_bytes())
            _add(tar, file.with_suffix(".cls").name, file.parent.name.removeprefix("class-").encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def mean_size(task: Task) -> float:
    """Return the mean size of a file in kB."""
    files = task.files()
    return sum(file.stat().st_size for file in files) / len(files) / 1000
