"""A source of image files, one folder a class, of any size, colour or grey."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.config import Data
from engine.data.sampler import Indices, Part, stratified_split
from engine.data.source import ImageFormat, Images, Labels
from engine.problems import Problem, UsageError

DEFAULT_SIZE = 224
# The statistics of ImageNet, which is what photographs are commonly normalised with.
COLOUR = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY = ((0.449,), (0.226,))
# How a whole file of a format ends. A file that ends otherwise is decoded to see whether it is whole.
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}


@dataclass(frozen=True)
class FolderSource:
    """Paths are relative to `root`."""

    root: str
    format: ImageFormat
    classes: tuple[str, ...]
    paths: dict[Part, tuple[str, ...]]
    labels: dict[Part, Labels]
    skipped: tuple[str, ...]
    in_memory: bool = field(default=False, init=False)

    def count(self, part: Part) -> int:
        return len(self.paths[part])

    def load(self, part: Part, indices: Indices) -> tuple[Images, Labels]:
        images = np.empty((len(indices), self.format.channels, self.format.size, self.format.size), np.uint8)
        for row, index in enumerate(indices):
            images[row] = read_image(Path(self.root, self.paths[part][index]), self.format)
        return images, self.labels[part][indices]


class UnreadableImageError(Exception):
    """An image that could be read at the start of the run no longer can; the text names it."""


def read_image(path: Path, image_format: ImageFormat) -> Images:
    """The image as C x H x W: upright, its shorter side brought to the size, its middle cut out. Raises
    UnreadableImageError."""
    size, mode = image_format.size, "L" if image_format.channels == 1 else "RGB"
    try:
        with Image.open(path) as file:
            # JPEG decodes straight to a smaller image where that is still large enough.
            file.draft(mode, (size, size))
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I") or image.mode == "F":
                image = _to_eight_bits(image)
            image = image.convert(mode)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableImageError(f"the image {path} cannot be read: {error}") from error
    pixels = np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR), np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Pillow cuts 16-bit greys off at 255; here they keep their shades."""
    values = np.asarray(image, np.float32)
    full = 65535.0 if values.max(initial=0) > 255 else 255.0
    return Image.fromarray((values * (255.0 / full)).clip(0, 255).astype(np.uint8), "L")


def open_folder(data: Data, seed: int) -> FolderSource:
    """Raises UsageError with all that is wrong with the folder."""
    root = Path(str(data.path))
    if not root.is_dir():
        raise UsageError.one(
            "data.path", f"{root} does not exist or is not a folder; give one with a folder for each class"
        )
    parts: dict[Part, Path] = {"train": root}
    if (root / "train").is_dir():
        parts = {"train": root / "train"}
        if (root / "val").is_dir():
            parts["val"] = root / "val"

    classes = tuple(
        sorted(entry.name for entry in os.scandir(parts["train"]) if entry.is_dir() and entry.name[0] != ".")
    )
    if len(classes) < 2:
        found = f"only the folder {classes[0]}" if classes else "no folder"
        raise UsageError.one(
            "data.path", f"{parts['train']} holds {found}; it needs a folder for each of two or more classes"
        )
    problems: list[Problem] = []
    skipped: list[str] = []
    paths: dict[Part, tuple[str, ...]] = {}
    labels: dict[Part, Labels] = {}
    for part, folder in parts.items():
        strange = {entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."} - set(classes)
        problems += [
            Problem("data.path", f"{folder / name} is no class of {parts['train']}") for name in sorted(strange)
        ]
        kept, kept_labels = [], []
        for label, name in enumerate(classes):
            good, bad = _good_images(folder / name)
            skipped += [f"{path.relative_to(root)} ({why})" for path, why in bad]
            if not good and (part == "train" or (folder / name).is_dir()):
                problems.append(
                    Problem("data.path", f"the class folder {folder / name} holds no image that can be read")
                )
            kept += [str(path.relative_to(root)) for path in good]
            kept_labels += [label] * len(good)
        paths[part], labels[part] = tuple(kept), np.array(kept_labels, np.int64)
    if problems:
        raise UsageError(problems)
    if "val" not in parts:
        all_paths, all_labels = paths["train"], labels["train"]
        train, val = stratified_split(all_labels, data.val_split, seed)
        paths = {"train": tuple(all_paths[index] for index in train), "val": tuple(all_paths[index] for index in val)}
        labels = {"train": all_labels[train], "val": all_labels[val]}
    mean, std = COLOUR if (data.channels or 3) == 3 else GREY
    image_format = ImageFormat(data.image_size or DEFAULT_SIZE, data.channels or 3, mean, std)
    return FolderSource(str(root), image_format, classes, paths, labels, tuple(skipped))


def _good_images(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The images at any depth below a folder, in the order of their names, and what is none with the reason."""
    files = sorted(
        Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names if name[0] != "."
    )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        faults = list(pool.map(_fault, files))
    good = [path for path, fault in zip(files, faults, strict=True) if fault is None]
    return good, [(path, fault) for path, fault in zip(files, faults, strict=True) if fault is not None]


def _fault(path: Path) -> str | None:
    """Why a file cannot be used, None where it can. Reads its head and its end; decodes it only where these do not
    tell."""
    try:
        with Image.open(path) as image:
            end = _ENDS.get(image.format or "")
            if end is not None and _last_bytes(path).rstrip(b"\0").endswith(end):
                return None
            image.load()
    except UnidentifiedImageError:
        return "not an image"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return f"broken: {error}"
    return None


def _last_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 64, 0))
        return file.read()
