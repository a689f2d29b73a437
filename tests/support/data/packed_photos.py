"""Photos of several formats in an image folder, and tar shards of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from engine.train.data.pack import Encoding, PackRequest, PackSummary, scan_for_pack, write_shards

NUM_PHOTOS = 24


def write_photos(root: Path, count: int = NUM_PHOTOS, *, validation: bool = False) -> Path:
    """Write JPEG files, some of them rotated by EXIF, and PNG files with transparency, of two classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        part = ("train", "val")[number % 4 == 3] if validation else ""
        folder = root / part / ("cat", "dog")[number // 2 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        blocks = Image.fromarray(rng.integers(0, 256, (6, 8, 4), np.uint8))
        photo = blocks.resize((60 + number % 24, 50), Image.Resampling.BICUBIC)
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6 if number % 5 == 0 else 1
        if number % 6 == 0:
            photo.save(folder / f"{number}.png")
        else:
            photo.convert("RGB").save(folder / f"{number}.jpg", quality=92, exif=exif, comment=b"by me")
    return root


def pack_photos(
    photos: Path,
    output: Path,
    encoding: Encoding | None = None,
    *,
    allow_empty: bool = False,
) -> PackSummary:
    request = PackRequest(photos, output, encoding, allow_empty)
    return write_shards(request, scan_for_pack(request))
