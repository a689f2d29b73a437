"""Pack an image folder into WebDataset tar shards, which `engine.train.data.sources.webdataset` trains from.

The images have the order, the labels and the parts of `engine.train.data.sources.folder`: with the same seed, training
on a folder and on the shards of its files as they are gives the same weights. The shards are a function of the image
files and the options, for any number of threads.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Annotated

from PIL import Image

from engine.base.codec import Meta, Record
from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.files import is_folder
from engine.base.host import available_cores
from engine.base.threads import CancellingPool, map_ahead
from engine.config.data_sections import CSV_SUFFIXES
from engine.train.data.checks import ALLOW_EMPTY, empty_class_problems
from engine.train.data.sampler import PARTS, Part
from engine.train.data.sources.base import UnreadableImageError
from engine.train.data.sources.folder import FolderScan, scan_folder
from engine.train.data.sources.image import load_picture, named_image, read_image_file
from engine.train.data.sources.tar_index import IMAGE_EXTENSIONS
from engine.train.data.sources.webdataset import CLASS_FILES, parse_class_names

DEFAULT_QUALITY = 90
SHARD_BYTES = 1 << 29
# Images that are re-encoded ahead of the one that is written, per thread. They are in memory.
AHEAD_PER_THREAD = 4


class Encoding(Record, frozen=True, kw_only=True):
    """How images are re-encoded. Without `max_side`, at full scale."""

    max_side: Annotated[int, Meta(gt=0, le=1 << 20)] | None
    quality: Annotated[int, Meta(ge=1, le=100)]


def reencode(data: bytes, encoding: Encoding) -> bytes:
    """Return an image as a baseline JPEG, which loads fast: upright, grayscale or RGB, transparent pixels on white,
    without EXIF data and color profile.

    The training ignores color profiles. Raises UnusableImageError, and the errors of Pillow's decoders.
    """
    picture, buffer = load_picture(data), BytesIO()
    longer = max(picture.size)
    if encoding.max_side is not None and longer > encoding.max_side:
        width, height = (max(round(side * encoding.max_side / longer), 1) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    # An empty comment replaces the comment of the original.
    picture.save(buffer, "JPEG", quality=encoding.quality, comment=b"")
    return buffer.getvalue()


@dataclass(frozen=True)
class PackRequest:
    """What to pack. Without `encoding`, image files are packed as they are."""

    folder: Path
    output: Path
    encoding: Encoding | None = None
    allow_empty: bool = False

    def content(self, name: str) -> bytes:
        """Return what the shards have of an image. Raises UnreadableImageError."""
        path = self.folder / name
        with named_image(lambda: str(path)):
            data = read_image_file(path)
            return data if self.encoding is None else reencode(data, self.encoding)


@dataclass(frozen=True)
class PackSummary:
    """What was packed."""

    output: str
    images: dict[str, int]
    classes: int
    size_bytes: int
    source_bytes: int
    skipped: tuple[str, ...]


def scan_for_pack(request: PackRequest) -> FolderScan:
    """Return the training and validation images of the folder of a request, with warnings about its argument.

    Raises UsageError, also if the output exists."""
    # Now, because the scan of a large folder takes minutes.
    _check_output(request)
    if request.folder.suffix.lower() in CSV_SUFFIXES:
        reason = f"{request.folder} has labels, and shards are written from a folder with one subfolder per class"
        raise UsageError.one("FOLDER", reason, "train on the file itself", code="not-supported")
    try:
        scan = scan_folder(request.folder)
        _class_file(scan.classes)
        if not request.allow_empty:
            raise_if_any([*empty_class_problems(scan.classes, scan.labels["train"], scan.skipped)])
    except UsageError as error:
        raise UsageError([_without_keys(problem) for problem in error.problems]) from error
    paths = {part: scan.paths[part] for part in PARTS if part in scan.paths}
    skipped = scan.skipped
    if "test" in scan.paths:
        skipped += ("the test images (shards have training and validation images only)",)
    return replace(scan, paths=paths, skipped=skipped, warnings=tuple(map(_without_keys, scan.warnings)))


def write_shards(
    request: PackRequest, scan: FolderScan, on_progress: Callable[[int, int], None] = lambda _, __: None
) -> PackSummary:
    """Write the shards of a folder, which appears when it is complete. `on_progress` is called with the number of
    images that are written, and of all. Raises UsageError."""
    output, total, done, threads = request.output, sum(map(len, scan.paths.values())), 0, available_cores()
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        with CancellingPool(threads) as pool:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            (unfinished / CLASS_FILES[0]).write_bytes(_class_file(scan.classes))
            for part, paths in scan.paths.items():
                contents = map_ahead(pool, request.content, paths, AHEAD_PER_THREAD * threads)
                names = (_member_name(path, row, request.encoding) for row, path in enumerate(paths))
                for _ in _write_part(unfinished, part, zip(names, contents, scan.labels[part].tolist(), strict=True)):
                    done += 1
                    on_progress(done, total)
            size_bytes = sum(path.stat().st_size for path in unfinished.iterdir())
            unfinished.rename(output)
    except UnreadableImageError as error:
        raise UsageError.one("FOLDER", str(error), "repair or remove it", code=error.code) from error
    except OSError as error:
        reason = f"{output} cannot be written: {error.strerror or error}"
        raise UsageError.one(
            "--output", reason, "free disk space, or choose another folder", code="disk-full"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    images: dict[str, int] = {part: len(scan.paths.get(part, ())) for part in PARTS}
    source_bytes = sum(int(scan.sizes[part].sum()) for part in scan.paths)
    return PackSummary(str(output), images, len(scan.classes), size_bytes, source_bytes, scan.skipped)


def _write_part(folder: Path, part: Part, images: Iterator[tuple[str, bytes, int]]) -> Iterator[None]:
    """Write the names, contents and labels of images to shards of about `SHARD_BYTES`, and yield after each. Raises
    OSError."""
    image = next(images, None)
    for number in count():
        if image is None:
            return
        with tarfile.open(folder / f"{part}-{number:05d}.tar", "w") as archive:
            while image is not None and archive.offset < SHARD_BYTES:
                name, content, label = image
                key, _, extension = name.rpartition(".")
                for ending, data in ((extension, content), ("cls", b"%d" % label)):
                    member = tarfile.TarInfo(f"{key}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
                image = next(images, None)
                yield


def _member_name(path: str, row: int, encoding: Encoding | None) -> str:
    """Return the name of an image in a shard: its number makes the key unique, which ends at the first dot."""
    folder, _, file = path.rpartition("/")
    extension = "jpg" if encoding is not None else Path(file).suffix[1:].lower()
    if extension not in IMAGE_EXTENSIONS:
        extension = "img"
    return f"{folder}/{row:07d}-{Path(file).stem.replace('.', '_')}.{extension}"


def _class_file(classes: Sequence[str]) -> bytes:
    """Return the content of the file of class names. Raises UsageError for names that it cannot have."""
    with suppress(UnicodeEncodeError):
        content = "".join(f"{name}\n" for name in classes).encode()
        if parse_class_names(content) == tuple(classes):
            return content
    reason = "a class folder has a name with a line break, a space at an end, or that is not UTF-8"
    raise UsageError.one("data.path", reason, "rename it", code="invalid-name")


def _check_output(request: PackRequest) -> None:
    """Raise UsageError for a folder that cannot be written, or that exists."""
    output = request.output
    if not is_folder(output.absolute().parent) or not os.access(output.absolute().parent, os.W_OK | os.X_OK):
        reason = f"{output.parent} is no folder to which you can write"
        raise UsageError.one("--output", reason, "choose another one", code="not-writable")
    if os.path.lexists(output):
        raise UsageError.one("--output", f"{output} exists", "choose another folder, or delete it", code="name-in-use")


def _without_keys(problem: Problem) -> Problem:
    """Return the problem of a folder with the command's arguments instead of config keys."""
    advice = problem.advice.replace(ALLOW_EMPTY, "--allow-empty").replace("data.path", "FOLDER")
    return replace(problem, location="FOLDER", advice=advice)
