"""Write WebDataset shards: tar archives with images and labels."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def write_shard(path: Path, members: Iterable[tuple[str, bytes]], *, tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar archive with members in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def encode_image(number: int, size: tuple[int, int] = (24, 20), image_format: str = "PNG") -> bytes:
    """Return an encoded image that differs for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), image_format)
    return file.getvalue()


def sample_members(numbers: Iterable[int], classes: int = 2) -> list[tuple[str, bytes]]:
    """Return image and label of samples; the label is the number modulo `classes`."""
    return [
        member
        for number in numbers
        for member in ((f"{number:04d}.png", encode_image(number)), (f"{number:04d}.cls", b"%d" % (number % classes)))
    ]


def write_shards(root: Path, *, shards: int = 3, images: int = 8, first: int = 0, name: str = "train") -> str:
    """Write shards with `images` images each and return their brace pattern."""
    for shard in range(shards):
        begin = first + shard * images
        write_shard(root / f"{name}-{shard:03d}.tar", sample_members(range(begin, begin + images)))
    return f"{root}/{name}-{{000..{shards - 1:03d}}}.tar"
