"""Image folders with one subfolder per class, for images of any size and mode."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from engine.config.data_sections import DataConfig
from engine.data.fingerprint import Fingerprint, hash_integers, hash_names
from engine.data.sampler import PARTS, Indices, Part, stratified_split
from engine.data.sources.base import ImageFormat, Labels, format_from_config
from engine.data.sources.decoded_cache import file_stamp
from engine.data.sources.encoded import EncodedImage, EncodedSource
from engine.data.sources.image import named_image, rotate_upright
from engine.data.sources.image_file import (
    IMAGE_FORMATS,
    MAX_IMAGE_BYTES,
    UnusableImageError,
    decode_error_reason,
    decoding,
    open_image,
    read_image_file,
)
from engine.data.sources.path_list import PathList, encode_paths
from engine.utils.codec import ENTRIES, Count, FileRecord, Integer, find_user_record, write_user_record
from engine.utils.errors import Problem, UsageError
from engine.utils.files import cache_folder
from engine.utils.text import list_names
from engine.utils.threads import CancellingPool

DEFAULT_IMAGE_SIZE = 224
ALLOW_EMPTY = "data.allow_empty=true"
# The record of readable images takes about 170 bytes per image.
MAX_RECORD_BYTES = 1 << 28
# ImageNet mean and std as in torchvision's models; for grayscale, their means over the channels.
IMAGENET_RGB_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGENET_GRAY_STATS = ((0.449,), (0.226,))
CLASS_FOLDERS_ADVICE = "set data.path to a folder with one subfolder per class"
# Names of dataset splits. A folder with only these subfolders has no class folders.
PART_FOLDER_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing"}


Stamp = tuple[Count, Integer, Integer]
"""The size of a file in bytes, and the times of modification and status change in nanoseconds."""


class ReadableImages(FileRecord, frozen=True, kw_only=True):
    """The stamps of the readable files of a folder by path, in the user's cache."""

    stamps: Annotated[dict[str, Stamp], ENTRIES]


@dataclass(frozen=True)
class FolderScan:
    """The readable images of a folder, before a split: `paths` relative to the folder, labels, sizes in bytes, and
    modification times in nanoseconds. Without a folder `val`, all of them are in the part train."""

    classes: tuple[str, ...]
    paths: dict[Part, PathList]
    labels: dict[Part, Labels]
    sizes: dict[Part, NDArray[np.int64]]
    mtimes_ns: dict[Part, NDArray[np.int64]]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class ScanProgress:
    """Class folders that are scanned, the current one as a fraction, of all; and how many files they have so far."""

    folders: float
    total_folders: int
    files: int


OnProgress = Callable[[ScanProgress], None]


@dataclass(frozen=True)
class FolderSource(EncodedSource):
    """Images of a folder, decoded on load. `paths` are relative to `root`; `sizes` are those of the files in bytes."""

    root: str
    format: ImageFormat
    classes: tuple[str, ...]
    paths: dict[Part, PathList]
    labels: dict[Part, Labels]
    sizes: dict[Part, NDArray[np.int64]]
    skipped: tuple[str, ...]

    @property
    def cache_root(self) -> str:
        return str(Path(self.root).resolve())

    def cache_stamp(self, part: Part, index: int) -> bytes:
        root = Path(self.root)
        return file_stamp(root / self.paths[part][index], root)

    def image_names(self, part: Part) -> Sequence[str]:
        return self.paths[part]

    def num_images(self, part: Part) -> int:
        return len(self.paths[part])

    def get_labels(self, part: Part) -> Labels:
        return self.labels[part]

    def fingerprint(self, part: Part) -> Fingerprint:
        return Fingerprint(
            names=hash_names(self.paths[part]),
            labels=hash_integers(self.labels[part]),
            sizes=hash_integers(self.sizes[part]),
        )

    def read_encoded(self, part: Part, index: int) -> EncodedImage:
        path = f"{self.root}/{self.paths[part][index]}"
        with named_image(path):
            return EncodedImage(read_image_file(path), lambda: path)


def open_folder(data: DataConfig, seed: int) -> FolderSource:
    """Scan a folder and split it into training and validation images. Raises UsageError with every problem found."""
    root = Path(str(data.path))
    scan = scan_folder(root, allow_empty=data.allow_empty)
    paths, labels, sizes = scan.paths, scan.labels, scan.sizes
    if "val" not in paths:
        rows: dict[Part, Indices] = dict(
            zip(PARTS, stratified_split(labels["train"], data.val_split, seed), strict=True)
        )
        paths = {part: scan.paths["train"].select(rows[part]) for part in PARTS}
        labels = {part: scan.labels["train"][rows[part]] for part in PARTS}
        sizes = {part: scan.sizes["train"][rows[part]] for part in PARTS}
    return FolderSource(str(root), encoded_format(data), scan.classes, paths, labels, sizes, scan.skipped)


def encoded_format(data: DataConfig) -> ImageFormat:
    """Return the format of encoded images, which have no size of their own. Raises UsageError."""
    mean, std = IMAGENET_RGB_STATS if (data.channels or 3) == 3 else IMAGENET_GRAY_STATS
    return format_from_config(data, ImageFormat(DEFAULT_IMAGE_SIZE, 3, mean, std))


def scan_folder(root: Path, *, allow_empty: bool, on_progress: OnProgress = lambda _: None) -> FolderScan:
    """Find the readable images of a folder. Raises UsageError with every problem found, among them empty classes."""
    with _usage_error_on_os_error(root):
        return _scan_folder(root, allow_empty=allow_empty, on_progress=on_progress)


def class_names(data: DataConfig) -> tuple[str, ...]:
    """Return the class names of a folder without opening any image. Raises UsageError."""
    root = Path(str(data.path))
    with _usage_error_on_os_error(root):
        return _find_parts(root)[1]


@contextmanager
def _usage_error_on_os_error(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        path = error.filename or root
        raise UsageError.one("data.path", f"{path} cannot be read: {error.strerror}", code="not-readable") from error


def _find_parts(root: Path) -> tuple[dict[Part, Path], tuple[str, ...]]:
    """Return the folder of each part and the class names. Without a train folder, `root` itself holds the classes."""
    if not root.is_dir():
        if root.is_file():
            others = ", or data.dataset to packed for a file of gputrain data pack, or to webdataset for tar shards"
            raise UsageError.one("data.path", f"{root} is a file", CLASS_FOLDERS_ADVICE + others, code="not-a-folder")
        raise UsageError.one(
            "data.path", f"{root} does not exist or is not a folder", CLASS_FOLDERS_ADVICE, code="not-found"
        )
    parts: dict[Part, Path] = {"train": root}
    if _subfolders(root / "train"):
        parts = {"train": root / "train"}
        if (root / "val").is_dir():
            parts["val"] = root / "val"
    classes = _subfolders(parts["train"])
    if len(classes) < 2:
        contents = f"only the folder {classes[0]}" if classes else "no folder"
        advice = CLASS_FOLDERS_ADVICE
        if any(root.glob("*.tar")):
            advice += ", or train on the tar shards with data.dataset=webdataset"
        raise UsageError.one("data.path", f"{parts['train']} contains {contents}", advice, code="too-few-classes")
    if {name.lower() for name in classes} <= PART_FOLDER_NAMES:
        raise UsageError.one(
            "data.path",
            f"{root} contains splits, not classes ({', '.join(classes)})",
            "rename them to train and val",
            code="wrong-format",
        )
    return parts, classes


def _scan_folder(root: Path, *, allow_empty: bool, on_progress: OnProgress) -> FolderScan:
    parts, classes = _find_parts(root)
    total_folders, scanned_folders, scanned_files = len(parts) * len(classes), 0, 0

    def report(checked: int, files: int) -> None:
        """Report the first `checked` of the files of the current class folder."""
        share = checked / files if files else 0
        on_progress(ScanProgress(scanned_folders + share, total_folders, scanned_files + checked))

    problems: list[Problem] = []
    skipped: list[str] = []
    paths: dict[Part, PathList] = {}
    labels: dict[Part, Labels] = {}
    sizes: dict[Part, NDArray[np.int64]] = {}
    mtimes_ns: dict[Part, NDArray[np.int64]] = {}
    # Faster than Path.relative_to, which takes 10 s for a million files.
    prefix = "" if root == Path() else f"{str(root).rstrip('/')}/"
    for part, folder in parts.items():
        unknown = sorted(set(_subfolders(folder)) - set(classes))
        problems += [
            Problem("data.path", f"{folder / name} is not a class of {parts['train']}", code="bad-label")
            for name in unknown
        ]
        empty: list[tuple[Path, list[str]]] = []
        # Arrays per class: lists of a million strings and numbers take 300 MB, which the process keeps.
        part_paths, counts, part_stamps = bytearray(), list[int](), [np.empty((0, 3), np.int64)]
        for name in classes:
            stamps_by_path, unreadable = _readable_images(folder / name, report)
            scanned_folders, scanned_files = scanned_folders + 1, scanned_files + len(stamps_by_path) + len(unreadable)
            report(0, 0)
            skipped += [f"{path.relative_to(root)} ({reason})" for path, reason in unreadable]
            if not stamps_by_path and (part == "train" or (folder / name).is_dir()):
                empty.append((folder / name, [f"{path.name}: {reason}" for path, reason in unreadable]))
            part_paths += encode_paths(str(path).removeprefix(prefix) for path in stamps_by_path)
            counts.append(len(stamps_by_path))
            part_stamps.append(np.array(list(stamps_by_path.values()), np.int64).reshape(-1, 3))
        if not part_paths:
            other = f"delete this folder to split {parts['train']}" if part == "val" else "set another data.path"
            reason = f"{folder} contains no readable image{_list_files([file for _, files in empty for file in files])}"
            problems.append(Problem("data.path", reason, f"add images, or {other}", code="no-images"))
        elif empty and not allow_empty:
            problems.append(_empty_class_problem(empty))
        paths[part], labels[part] = PathList.of_buffer(bytes(part_paths)), np.repeat(np.arange(len(classes)), counts)
        sizes[part], mtimes_ns[part] = (
            np.concatenate([stamps[:, column] for stamps in part_stamps]) for column in (0, 1)
        )
    if problems:
        raise UsageError(problems)
    return FolderScan(classes, paths, labels, sizes, mtimes_ns, tuple(skipped))


def _empty_class_problem(empty: Sequence[tuple[Path, Sequence[str]]]) -> Problem:
    """Return the problem of class folders without a readable image, each with its files and why they are none."""
    folder, files = empty[0]
    if len(empty) == 1:
        reason = f"the class folder {folder} contains no readable image{_list_files(files)}"
        return Problem(
            "data.path",
            reason,
            f"add images, delete the folder, or keep its class with {ALLOW_EMPTY}",
            code="empty-class",
        )
    names = list_names([folder.name for folder, _ in empty])
    reason = f"{len(empty)} class folders of {folder.parent} contain no readable image ({names})"
    return Problem(
        "data.path",
        reason,
        f"add images, delete the folders, or keep their classes with {ALLOW_EMPTY}",
        code="empty-class",
    )


def _list_files(files: Sequence[str]) -> str:
    return f" ({list_names(files)})" if files else ""


def _subfolders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the subfolders, without hidden ones; empty if the folder does not exist."""
    if not folder.is_dir():
        return ()
    with os.scandir(folder) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")))


def _readable_images(
    folder: Path, report: Callable[[int, int], None]
) -> tuple[dict[Path, Stamp], list[tuple[Path, str]]]:
    """Return the stamp of each readable image at any depth below a folder, sorted by path, and the other files with the
    reason. `report` is called with how many of the files are checked, and their number.

    Readable files are recorded in the user's cache by stamp, and checked again only after a change: damage may keep
    size and modification time. Unreadable files are checked each time, because they may have been repaired.
    """
    files = sorted(walk_files(folder))
    cache = record_name(folder)
    found = find_user_record(cache_folder(), cache, ReadableImages, MAX_RECORD_BYTES)
    recorded = {} if found is None else found.stamps
    stamps = {path: _stamp(path.stat()) for path in files if path.exists()}
    unchecked = [path for path in files if path not in stamps or recorded.get(_record_key(path)) != stamps[path]]
    reasons: dict[Path, str | None] = {}
    with CancellingPool(min(8, os.cpu_count() or 1)) as pool:
        for path, reason in zip(unchecked, pool.map(_unreadable_reason, unchecked), strict=True):
            reasons[path] = reason
            report(len(files) - len(unchecked) + len(reasons), len(files))
    readable = [path for path in files if reasons.get(path) is None]
    if len(readable) != len(recorded) or any(reason is None for reason in reasons.values()):
        with suppress(OSError):
            written = {_record_key(path): stamps[path] for path in readable if path in stamps}
            write_user_record(cache_folder(), cache, ReadableImages(stamps=written))
    return {path: stamps.get(path, (0, 0, 0)) for path in readable}, [
        (path, reason) for path in files if (reason := reasons.get(path))
    ]


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _record_key(path: Path) -> str:
    # A name that is not UTF-8 has lone surrogates, which JSON does not have.
    return str(path).encode(errors="backslashreplace").decode()


def record_name(folder: Path) -> str:
    """Return the name of a folder's record of readable images. It changes with what gputrain accepts as an image."""
    key = os.fsencode(f"{folder}\0{IMAGE_FORMATS}\0{MAX_IMAGE_BYTES}")
    return f"images-{hashlib.sha256(key).hexdigest()[:16]}.json"


def walk_files(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder except hidden ones.

    Follows symbolic links, but visits each folder once: a link to a parent folder would otherwise repeat its images.
    """
    seen: set[tuple[int, int]] = set()
    for current, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        status = Path(current).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield from (Path(current, name) for name in names if not name.startswith("."))


def _unreadable_reason(path: Path) -> str | None:
    """Decode a file to find out why it is unusable; None if it is usable. A JPEG is decoded at down to 1/8 scale."""
    try:
        if not path.is_file():
            return "not a file"
        with open_image(read_image_file(path)) as image:
            if image.mode == "F":
                return "floating-point pixels (Pillow mode F) are not supported"
            image.draft("L", (32, 32))
            with decoding(image):
                rotate_upright(image).load()
    except UnusableImageError as error:
        return str(error)
    except MemoryError:
        return "not enough memory to decode it"
    except Exception as error:
        # Decoders raise arbitrary exceptions for a damaged file.
        return f"broken: {decode_error_reason(error)}"
    return None
