"""A source of image files, one folder a class, of any size, colour or grey."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.config import Data
from engine.data.sampler import Indices, Part, stratified_split
from engine.data.source import ImageFormat, Images, Labels, UnreadableImageError
from engine.files import cache_folder, read_json, write_json
from engine.problems import Problem, UsageError

DEFAULT_SIZE = 224
# The statistics of ImageNet, which is what photographs are commonly normalised with.
COLOUR = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GREY = ((0.449,), (0.226,))
# Names that a folder of parts has, not one of classes.
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}


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

    def labels_of(self, part: Part) -> Labels:
        return self.labels[part]

    def load(self, part: Part, indices: Indices) -> tuple[Images, Labels]:
        images = np.empty((len(indices), self.format.channels, self.format.size, self.format.size), np.uint8)
        for row, index in enumerate(indices):
            images[row] = read_image(Path(self.root, self.paths[part][index]), self.format)
        return images, self.labels[part][indices]


def read_image(path: Path, image_format: ImageFormat) -> Images:
    """The image as C x H x W: upright, its shorter side brought to the size, its middle cut out. Raises
    UnreadableImageError."""
    size, mode = image_format.size, "L" if image_format.channels == 1 else "RGB"
    try:
        with Image.open(path) as file:
            # JPEG decodes straight to a smaller image where that is still large enough.
            file.draft(mode, (size, size))
            image = ImageOps.exif_transpose(file)
            image = _to_eight_bits(image).convert(mode)
    except Exception as error:
        # A damaged file brings any error out of a decoder.
        raise UnreadableImageError(f"the image {path} cannot be read: {error}") from error
    pixels = np.asarray(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR), np.uint8)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greys brought to 8 bits with their shades; Pillow itself cuts them off at 255. Raises ValueError for
    numbers of which nobody knows what is white."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, for which no white is defined")
    if not image.mode.startswith("I"):
        return image
    shades = np.asarray(image).astype(np.int64) // 257
    return Image.fromarray(shades.clip(0, 255).astype(np.uint8))


def open_folder(data: Data, seed: int) -> FolderSource:
    """Raises UsageError with all that is wrong with the folder."""
    root = Path(str(data.path))
    try:
        return _open_folder(root, data, seed)
    except OSError as error:
        where = error.filename or root
        raise UsageError.one("data.path", f"{where} cannot be read: {error.strerror}") from error


def _open_folder(root: Path, data: Data, seed: int) -> FolderSource:
    if not root.is_dir():
        raise UsageError.one(
            "data.path", f"{root} does not exist or is no folder; give one with a folder for each class"
        )
    parts: dict[Part, Path] = {"train": root}
    if _folders_in(root / "train"):
        parts = {"train": root / "train"}
        if (root / "val").is_dir():
            parts["val"] = root / "val"
    classes = _folders_in(parts["train"])
    if len(classes) < 2:
        found = f"only the folder {classes[0]}" if classes else "no folder"
        raise UsageError.one(
            "data.path", f"{parts['train']} holds {found}; it needs a folder for each of two or more classes"
        )
    if {name.lower() for name in classes} <= _PARTS:
        raise UsageError.one(
            "data.path", f"{root} looks like parts and not classes ({', '.join(classes)}); name them train and val"
        )

    problems: list[Problem] = []
    skipped: list[str] = []
    paths: dict[Part, tuple[str, ...]] = {}
    labels: dict[Part, Labels] = {}
    for part, folder in parts.items():
        strange = sorted(set(_folders_in(folder)) - set(classes))
        problems += [Problem("data.path", f"{folder / name} is no class of {parts['train']}") for name in strange]
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
        if not kept and part == "val":
            problems.append(
                Problem("data.path", f"{folder} holds no image; fill it, or take it away to split {parts['train']}")
            )
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


def _folders_in(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, sorted, without hidden ones; none where it is not there."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _good_images(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The images at any depth below a folder, in the order of their names, and what is none with the reason. Good
    ones are kept in mind in the user's cache and decoded again only when they have changed; the others are looked at
    each time, for what is wrong with them may have been mended."""
    files = sorted(_files_below(folder))
    cache = cache_folder() / f"images-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"
    known = read_json(cache) or {}
    marks = {path: [(status := path.stat()).st_size, status.st_mtime_ns] for path in files if path.exists()}
    fresh = [path for path in files if path not in marks or known.get(str(path)) != marks[path]]
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        found = dict(zip(fresh, pool.map(_fault, fresh), strict=True))
    finally:
        # Ctrl-C must not wait for the files that nobody has looked at.
        pool.shutdown(cancel_futures=True)
    good = [path for path in files if found.get(path) is None]
    if len(good) != len(known) or any(fault is None for fault in found.values()):
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, {str(path): marks[path] for path in good if path in marks})
    return good, [(path, why) for path in files if (why := found.get(path))]


def _files_below(folder: Path) -> Iterator[Path]:
    """Links to folders are followed, each folder once: a link that leads back up would multiply its images."""
    seen: set[tuple[int, int]] = set()
    for where, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        status = Path(where).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (Path(where, name) for name in names if not name.startswith("."))


def _fault(path: Path) -> str | None:
    """Why a file cannot be used, None where it can: it is decoded once, a JPEG at an eighth of its size."""
    try:
        if not path.is_file():
            return "not a file"
        with Image.open(path) as image:
            if image.mode == "F":
                return "its pixels are floating-point numbers, for which no white is defined"
            image.draft("L", (32, 32))
            ImageOps.exif_transpose(image).load()
    except UnidentifiedImageError:
        return "not an image"
    except Exception as error:
        # A damaged file brings any error out of a decoder.
        return f"broken: {error}"
    return None
