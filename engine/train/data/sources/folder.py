"""Image folders with one subfolder per class, for images of any size and mode."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from engine.base.codec import ENTRIES, Count, FileRecord, Integer, find_user_record, write_user_record
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.files import cache_folder
from engine.base.text import list_names
from engine.base.threads import CancellingPool
from engine.config.data_sections import DataConfig
from engine.config.schema import Config
from engine.train.data.sampler import PARTS, Indices, Part, stratified_split
from engine.train.data.sources.base import EncodedSource, Fingerprint, Labels, hash_names, hash_numbers
from engine.train.data.sources.folder_layout import (
    PART_NOUNS,
    SYSTEM_REASON,
    find_layout,
    list_folders,
    walk_files,
)
from engine.train.data.sources.formats import ImageFormat, format_from_config
from engine.train.data.sources.image import (
    IMAGE_FORMATS,
    MAX_IMAGE_BYTES,
    UnusableImageError,
    check_mode,
    decode_error_reason,
    named_image,
    open_image,
    read_image_file,
    rotate_upright,
)

DEFAULT_IMAGE_SIZE = 224
# The record of readable images takes about 190 bytes per image.
MAX_RECORD_BYTES = 1 << 28
# ImageNet mean and std as in torchvision's models; for grayscale, their means over the channels.
IMAGENET_RGB_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
IMAGENET_GRAY_STATS = ((0.449,), (0.226,))


FileFacts = tuple[Count, Integer, Integer, Integer]
"""The size of a file in bytes, the times of modification and status change in nanoseconds, and a digest of its content.

It has not changed since if the first three, its stamp, have not."""
DIGEST_BYTES = 7  # two of a million images have the same digest by chance with a probability of 1e-5


class ReadableImages(FileRecord, frozen=True, kw_only=True):
    """The readable files of a folder or table by path, in the user's cache."""

    files: Annotated[dict[str, FileFacts], ENTRIES]


@dataclass(frozen=True)
class FolderScan:
    """The readable images of a folder or table, before a split: `paths` relative to the folder, labels, sizes in bytes,
    and digests of the contents.

    Without a split for validation, its images are in the part train. `skipped` also has the folders that are not used,
    and `warnings` says what may not be meant."""

    classes: tuple[str, ...]
    paths: dict[Part, list[str]]
    labels: dict[Part, Labels]
    sizes: dict[Part, NDArray[np.int64]]
    digests: dict[Part, NDArray[np.int64]]
    skipped: tuple[str, ...]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True)
class FolderSource(FolderScan, EncodedSource):
    """Images of a scanned folder, decoded on load. `paths` are relative to `root`."""

    root: str
    format: ImageFormat

    def cache_key(self, part: Part) -> str:
        return hash_names([os.path.realpath(self.root), *self.paths[part], hash_numbers(self.digests[part])])

    def image_names(self, part: Part) -> Sequence[str]:
        return self.paths[part]

    def fingerprint(self, part: Part) -> Fingerprint:
        return Fingerprint(
            names=hash_names(self.paths[part]),
            labels=hash_numbers(self.labels[part]),
            sizes=hash_numbers(self.sizes[part]),
        )

    def describe(self, part: Part, index: int) -> str:
        return f"{self.root}/{self.paths[part][index]}"

    def read_encoded(self, part: Part, index: int) -> bytes:
        path = self.describe(part, index)
        with named_image(lambda: path):
            return read_image_file(path)


def open_folder(config: Config) -> FolderSource:
    """Scan a folder and split it into training and validation images. Raises UsageError with every problem found."""
    root = Path(str(config.data.path))
    return open_scan(scan_folder(root), root, config)


def open_scan(scan: FolderScan, root: Path, config: Config) -> FolderSource:
    """Return the source of scanned images, split into training and validation if they are not. Raises UsageError."""
    if "val" not in scan.paths:
        train, val = stratified_split(scan.labels["train"], config.data.val_split, config.run.seed)
        rows: dict[Part, Indices] = {"train": train, "val": val}
        split: dict[Part, list[str]] = {
            part: [scan.paths["train"][row] for row in rows[part].tolist()] for part in PARTS
        }
        digests = {part: scan.digests["train"][rows[part]] for part in PARTS}
        scan = replace(
            scan,
            paths=scan.paths | split,
            labels=scan.labels | {part: scan.labels["train"][rows[part]] for part in PARTS},
            sizes=scan.sizes | {part: scan.sizes["train"][rows[part]] for part in PARTS},
            digests=scan.digests | digests,
            warnings=(*scan.warnings, *repeated_image_warnings(split, digests)),
        )
    return FolderSource(**vars(scan), root=str(root), format=encoded_format(config.data))


def repeated_image_warnings(paths: dict[Part, list[str]], digests: dict[Part, NDArray[np.int64]]) -> Iterator[Problem]:
    """Yield a warning for each part whose images are also in another one that the run learns from or chooses by."""
    earlier: list[Part] = []
    for part in paths:
        known = np.concatenate([digests[name] for name in earlier]) if earlier else np.empty(0, np.int64)
        repeated = np.flatnonzero(np.isin(digests[part], known))
        if len(repeated):
            names = list_names([paths[part][row] for row in repeated.tolist()])
            others = " or ".join(PART_NOUNS[name] for name in earlier)
            found = f"{len(repeated)} of {len(paths[part])} ({names})"
            reason = f"{PART_NOUNS[part]} images that are also {others} images: {found}"
            advice = "remove the copies: the results on images that the model has learned say little"
            yield Problem("data.path", reason, advice, code="images-repeated")
        earlier.append(part)


def encoded_format(data: DataConfig) -> ImageFormat:
    """Return the format of encoded images, which have no size of their own. Raises UsageError."""
    mean, std = IMAGENET_RGB_STATS if (data.channels or 3) == 3 else IMAGENET_GRAY_STATS
    return format_from_config(data, ImageFormat(DEFAULT_IMAGE_SIZE, 3, mean, std))


@contextmanager
def usage_error_on_os_error() -> Iterator[None]:
    """Raise an OSError of a file as a UsageError, in a block or in a function that it decorates."""
    try:
        yield
    except OSError as error:
        # An error of a file that is already open, as of a network file system, names none.
        reason = f"{error.filename or 'a file of the dataset'} cannot be read: {error.strerror}"
        raise UsageError.one("data.path", reason, code="not-readable") from error


@usage_error_on_os_error()
def class_names(config: Config) -> tuple[str, ...]:
    """Return the class names of a folder without opening any image. Raises UsageError."""
    return find_layout(Path(str(config.data.path))).classes


@usage_error_on_os_error()
def scan_folder(root: Path) -> FolderScan:
    """Find the readable images of a folder. Raises UsageError with every problem found."""
    layout = find_layout(root)
    parts, classes = layout.parts, layout.classes
    problems: list[Problem] = []
    skipped = list(layout.ignored)
    nested: dict[str, list[str]] = {}
    paths: dict[Part, list[str]] = {}
    labels: dict[Part, Labels] = {}
    sizes: dict[Part, NDArray[np.int64]] = {}
    digests: dict[Part, NDArray[np.int64]] = {}
    # Faster than Path.relative_to, which takes 10 s for a million files.
    prefix = "" if root == Path() else f"{str(root).rstrip('/')}/"
    for part, folder in parts.items():
        classes_here = list_folders(folder)
        unknown = sorted(set(classes_here) - set(classes))
        problems += [
            Problem("data.path", f"{folder / name} is not a class of {parts['train']}", code="bad-label")
            for name in unknown
        ]
        # Arrays per class: lists of a million numbers take 200 MB, which the process keeps.
        part_paths, counts, part_facts = list[str](), list[int](), [np.empty((0, 4), np.int64)]
        first_skipped = len(skipped)
        for name in classes:
            facts_by_path, unreadable = _readable_images(folder / name)
            skipped += [f"{path.relative_to(root)} ({reason})" for path, reason in unreadable]
            class_paths = [str(path).removeprefix(prefix) for path in facts_by_path]
            if part == "train" and (inner := _inner_folders(class_paths, str(folder / name).removeprefix(prefix))):
                nested[name] = inner
            part_paths += class_paths
            counts.append(len(facts_by_path))
            part_facts.append(np.array(list(facts_by_path.values()), np.int64).reshape(-1, 4))
        if not part_paths and part != "test":
            files = f" ({list_names(skipped[first_skipped:])})" if len(skipped) > first_skipped else ""
            reason = f"{folder} contains no readable image{files}" if classes_here else f"{folder} has no class folders"
            advice = "add images, or set another data.path"
            if part == "val":
                advice = f"sort its images into folders of the classes, or move it elsewhere to split {parts['train']}"
            problems.append(Problem("data.path", reason, advice, code="no-images"))
        paths[part], labels[part] = part_paths, np.repeat(np.arange(len(classes)), counts)
        sizes[part], digests[part] = (np.concatenate([facts[:, column] for facts in part_facts]) for column in (0, 3))
    raise_if_any(problems)
    if "test" in paths and not paths["test"]:
        skipped.append(f"{parts['test'].name} (not evaluated: no readable image)")
        del paths["test"]
    warnings = list(repeated_image_warnings(paths, digests))
    if nested:
        inner_names = list_names([name for names in nested.values() for name in names])
        reason = f"the subfolders of a class are no classes of their own: {inner_names}"
        advice = "if they are classes, move them into one folder"
        warnings.insert(0, Problem("data.path", reason, advice, code="nested-classes"))
    return FolderScan(classes, paths, labels, sizes, digests, tuple(skipped), tuple(warnings))


def _inner_folders(paths: Sequence[str], folder: str) -> list[str]:
    """Return the subfolders of a class folder that have all of its images, if there are two or more."""
    folders = {path.rpartition("/")[0] for path in paths}
    inner = {path.removeprefix(f"{folder}/").partition("/")[0] for path in folders}
    return sorted(f"{folder}/{name}" for name in inner) if folder not in folders and len(inner) > 1 else []


def _readable_images(folder: Path) -> tuple[dict[Path, FileFacts], list[tuple[Path, str]]]:
    """Return the readable images at any depth below a folder, sorted by path, and the other files with the reason."""
    system_folders: list[Path] = []
    files = sorted(walk_files(folder, system_folders.append))
    readable, reasons = check_images(files, folder)
    return readable, sorted([*((path, SYSTEM_REASON) for path in system_folders), *reasons])


def check_images(files: Sequence[Path], owner: Path) -> tuple[dict[Path, FileFacts], list[tuple[Path, str]]]:
    """Return the facts of each readable image in the order of the files, and the other files with the reason.

    Readable files are recorded in the user's cache by stamp, for the folder or table that names the files, and checked
    again only after a change: damage may keep size and modification time. Unreadable files are checked each time,
    because they may have been repaired.
    """
    cache = record_name(owner)
    found = find_user_record(cache_folder(), cache, ReadableImages, MAX_RECORD_BYTES)
    recorded = {} if found is None else found.files
    stamps = {path: _stamp(path.stat()) for path in files if path.exists()}
    facts: dict[Path, FileFacts] = {}
    for path, stamp in stamps.items():
        known = recorded.get(_record_key(path))
        if known is not None and known[:3] == stamp:
            facts[path] = known
    unchecked = [path for path in files if path not in facts]
    reasons: list[tuple[Path, str]] = []
    with CancellingPool(min(8, os.cpu_count() or 1)) as pool:
        for path, found_out in zip(unchecked, pool.map(_check_image, unchecked), strict=True):
            if isinstance(found_out, str):
                reasons.append((path, found_out))
            else:
                facts[path] = (*stamps.get(path, (0, 0, 0)), found_out)
    readable = {path: facts[path] for path in files if path in facts}
    if len(readable) != len(recorded) or not facts.keys().isdisjoint(unchecked):
        with suppress(OSError):
            written = {_record_key(path): facts[path] for path in readable if path in stamps}
            write_user_record(cache_folder(), cache, ReadableImages(files=written))
    return readable, reasons


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _record_key(path: Path) -> str:
    # A name that is not UTF-8 has lone surrogates, which JSON does not have.
    return str(path).encode(errors="backslashreplace").decode()


def record_name(owner: Path) -> str:
    """Return the name of the record of readable images of a folder or table.

    It changes with what gputrain accepts as an image."""
    key = os.fsencode(f"{owner}\0{IMAGE_FORMATS}\0{MAX_IMAGE_BYTES}")
    return f"images-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _check_image(path: Path) -> str | int:
    """Decode a file, and return the digest of its content, or why it is unusable. A JPEG is decoded at down to 1/8
    scale."""
    try:
        if not path.is_file():
            return "not a file"
        data = read_image_file(path)
        with open_image(data) as image:
            check_mode(image)
            image.draft("L", (32, 32))
            rotate_upright(image).load()
    except UnusableImageError as error:
        return str(error)
    except MemoryError:
        return "not enough memory to decode it"
    except Exception as error:
        # Decoders raise arbitrary exceptions for a damaged file.
        return f"broken: {decode_error_reason(error)}"
    return int.from_bytes(blake2b(data, digest_size=DIGEST_BYTES).digest())
