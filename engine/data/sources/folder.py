"""A source of image files, one folder a class, of any size, colour or grey."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.config.data_sections import DataConfig
from engine.data.sampler import Indices, Part, stratified_split
from engine.data.sources.base import CropSpec, ImageFormat, Images, Labels
from engine.data.sources.image import read_image
from engine.utils.errors import Problem, UsageError
from engine.utils.files import cache_folder, read_json, write_json

DEFAULT_IMAGE_SIZE = 224
# The statistics of ImageNet, which is what photographs are commonly normalised with.
IMAGENET_RGB_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGENET_GRAY_STATS = ((0.449,), (0.226,))
# Names that a folder of parts has, not one of classes.
_PART_FOLDER_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


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

    def num_images(self, part: Part) -> int:
        return len(self.paths[part])

    def get_labels(self, part: Part) -> Labels:
        return self.labels[part]

    def load(self, part: Part, indices: Indices, crop: CropSpec | None = None) -> tuple[Images, Labels]:
        images = np.empty((len(indices), self.format.channels, self.format.size, self.format.size), np.uint8)
        for row, index in enumerate(indices):
            cut = partial(crop.box, int(index)) if crop else None
            images[row] = read_image(Path(self.root, self.paths[part][index]), self.format, cut)
        return images, self.labels[part][indices]


def open_folder(data: DataConfig, seed: int) -> FolderSource:
    """Raises UsageError with all that is wrong with the folder."""
    root = Path(str(data.path))
    with _usage_error_on_os_error(root):
        return _scan_folder(root, data, seed)


def class_names(data: DataConfig) -> tuple[str, ...]:
    """The classes of a folder, of which no image is looked at. Raises UsageError."""
    root = Path(str(data.path))
    with _usage_error_on_os_error(root):
        return _find_parts(root)[1]


@contextmanager
def _usage_error_on_os_error(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise UsageError.one("data.path", f"{where} cannot be read: {error.strerror}") from error


def _find_parts(root: Path) -> tuple[dict[Part, Path], tuple[str, ...]]:
    """The folders of the parts, and the names of the classes."""
    if not root.is_dir():
        raise UsageError.one(
            "data.path", f"{root} does not exist or is no folder; give one with a folder for each class"
        )
    parts: dict[Part, Path] = {"train": root}
    if _subfolders(root / "train"):
        parts = {"train": root / "train"}
        if (root / "val").is_dir():
            parts["val"] = root / "val"
    classes = _subfolders(parts["train"])
    if len(classes) < 2:
        found = f"only the folder {classes[0]}" if classes else "no folder"
        raise UsageError.one(
            "data.path", f"{parts['train']} holds {found}; it needs a folder for each of two or more classes"
        )
    if {name.lower() for name in classes} <= _PART_FOLDER_NAMES:
        raise UsageError.one(
            "data.path", f"{root} looks like parts and not classes ({', '.join(classes)}); name them train and val"
        )
    return parts, classes


def _scan_folder(root: Path, data: DataConfig, seed: int) -> FolderSource:
    parts, classes = _find_parts(root)
    problems: list[Problem] = []
    skipped: list[str] = []
    paths: dict[Part, tuple[str, ...]] = {}
    labels: dict[Part, Labels] = {}
    for part, folder in parts.items():
        strange = sorted(set(_subfolders(folder)) - set(classes))
        problems += [Problem("data.path", f"{folder / name} is no class of {parts['train']}") for name in strange]
        kept, kept_labels = [], []
        for label, name in enumerate(classes):
            good, bad = _readable_images(folder / name)
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
    mean, std = IMAGENET_RGB_STATS if (data.channels or 3) == 3 else IMAGENET_GRAY_STATS
    image_format = ImageFormat(data.image_size or DEFAULT_IMAGE_SIZE, data.channels or 3, mean, std)
    return FolderSource(str(root), image_format, classes, paths, labels, tuple(skipped))


def _subfolders(folder: Path) -> tuple[str, ...]:
    """Names of the folders in a folder, sorted, without hidden ones; none where it is not there."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _readable_images(folder: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """The images at any depth below a folder, in the order of their names, and what is none with the reason. Good
    ones are kept in mind in the user's cache and decoded again only when they have changed; the others are looked at
    each time, for what is wrong with them may have been mended."""
    files = sorted(walk_files(folder))
    cache = cache_folder() / f"images-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"
    known = read_json(cache) or {}
    marks = {path: [(status := path.stat()).st_size, status.st_mtime_ns] for path in files if path.exists()}
    fresh = [path for path in files if path not in marks or known.get(str(path)) != marks[path]]
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        found = dict(zip(fresh, pool.map(_unreadable_reason, fresh), strict=True))
    finally:
        # Ctrl-C must not wait for the files that nobody has looked at.
        pool.shutdown(cancel_futures=True)
    good = [path for path in files if found.get(path) is None]
    if len(good) != len(known) or any(fault is None for fault in found.values()):
        with suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(cache, {str(path): marks[path] for path in good if path in marks})
    return good, [(path, why) for path in files if (why := found.get(path))]


def walk_files(folder: Path) -> Iterator[Path]:
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


def _unreadable_reason(path: Path) -> str | None:
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
