"""Index of WebDataset shards: where their images are, and their labels. It is kept in the user's cache.

A sample consists of consecutive members with the same key, the path up to the first dot of the file name:
`dog/0001.jpg` and `dog/0001.cls`. `engine.train.data.sources.webdataset` reads the images.

https://github.com/webdataset/webdataset#the-webdataset-format
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
import time
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.base.errors import CodedError
from engine.base.files import (
    cache_folder,
    delete_oldest_files,
    make_user_folder,
    open_regular_file,
    replace_file,
    user_path_problem,
)
from engine.base.text import pluralize, printable
from engine.train.data.sources.image import MAX_IMAGE_BYTES, decode_error_reason

INDEX_FOLDER = "shards"
# Part of the file name of an index: another version of gputrain may know other members or labels.
INDEX_FORMAT = 2
# All indices together. ImageNet takes 60 MB.
MAX_TOTAL_BYTES = 1 << 30
PROGRESS_SECONDS = 2.0
IMAGE_EXTENSIONS = {
    *("jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "bmp", "gif", "tif", "tiff", "avif", "jp2"),
    *("img", "image"),
}
MAX_LABEL_BYTES = 1 << 20
MAX_LABEL = (1 << 31) - 1


class ShardError(CodedError):
    """A shard cannot be used. The message names it."""


@dataclass(frozen=True)
class TarIndex:
    """Images of shards in the order of the archives, by column.

    `stamps` has the size and the modification time of each shard, `shards` the number of the shard of each image.
    `offsets` and `sizes` are those of its content, and `key_digests` the first 64 bits of the SHA-256 of its key.
    `names` has the name of each image and a null byte: a million strings take 100 MB. `skipped` are unusable members,
    each with the reason in parentheses.
    """

    stamps: NDArray[np.int64]
    shards: NDArray[np.int32]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int32]
    labels: NDArray[np.int32]
    key_digests: NDArray[np.uint64]
    names: bytes
    skipped: tuple[str, ...]

    def image_names(self) -> list[str]:
        """Return the name of each image, the path in its archive."""
        return os.fsdecode(self.names).split("\0")[:-1]


_COLUMNS = {"shards": "i", "offsets": "q", "sizes": "i", "labels": "i", "key_digests": "Q"}


def open_shard(path: str) -> BinaryIO:
    """Open a shard for reading. Raises ShardError if it is not a regular file, or cannot be read."""
    try:
        # Links are followed: the Hugging Face cache consists of them.
        return open_regular_file(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise ShardError(
            f"the shard {path} cannot be read: {decode_error_reason(error)}", code="not-readable"
        ) from error


def shard_stamp(file: BinaryIO) -> tuple[int, int]:
    """Return the size and the modification time of an open shard, which its index has, too."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def load_index(paths: Sequence[str]) -> TarIndex:
    """Return the index of shards: that in the user's cache, or a new one if a shard has changed. Raises ShardError."""
    stamps = []
    for path in paths:
        with open_shard(path) as file:
            stamps.append(shard_stamp(file))
    key = "\0".join([str(INDEX_FORMAT), *sorted(IMAGE_EXTENSIONS), *map(os.path.realpath, paths)])
    name = f"{INDEX_FOLDER}/{hashlib.sha256(os.fsencode(key)).hexdigest()[:24]}.npz"
    if (index := _read_cached(name, stamps)) is None:
        index = _build_index(paths, stamps)
        with suppress(OSError):
            _write_cached(name, index)
    return index


def _read_cached(name: str, stamps: Sequence[tuple[int, int]]) -> TarIndex | None:
    """Return an index in the user's cache; None if it is missing or damaged, or a shard has another stamp."""
    path = cache_folder() / name
    if user_path_problem(cache_folder(), name) is not None:
        return None
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(path, allow_pickle=False) as stored:
            if stored["stamps"].tolist() != [list(stamp) for stamp in stamps]:
                return None
            names, skipped = stored["names"].tobytes(), os.fsdecode(stored["skipped"].tobytes()).split("\0")[:-1]
            columns = {column: stored[column] for column in ("stamps", *_COLUMNS)}
        if {len(columns[column]) for column in _COLUMNS} == {names.count(b"\0")}:
            os.utime(path)
            return TarIndex(names=names, skipped=tuple(skipped), **columns)
    return None


def _write_cached(name: str, index: TarIndex) -> None:
    """Write an index to the user's cache, and delete those that were unused for longest. Raises OSError."""
    folder = make_user_folder(cache_folder(), INDEX_FOLDER)
    columns = {column: getattr(index, column) for column in ("stamps", *_COLUMNS)}
    skipped = b"".join(os.fsencode(text) + b"\0" for text in index.skipped)
    columns |= {"names": np.frombuffer(index.names, np.uint8), "skipped": np.frombuffer(skipped, np.uint8)}
    replace_file(cache_folder() / name, lambda file: np.savez(file, allow_pickle=False, **columns))
    delete_oldest_files(folder, MAX_TOTAL_BYTES)


def _build_index(paths: Sequence[str], stamps: Sequence[tuple[int, int]]) -> TarIndex:
    """Read the headers and labels of shards. Prints its progress to stderr. Raises ShardError."""
    columns = {column: array(kind) for column, kind in _COLUMNS.items()}
    names, skipped = bytearray(), list[str]()
    shown = time.monotonic()
    for number, (path, stamp) in enumerate(zip(paths, stamps, strict=True)):
        reasons: list[str] = []
        with open_shard(path) as file:
            for key, member, label in _read_samples(path, file, reasons):
                digest = int.from_bytes(hashlib.sha256(os.fsencode(key)).digest()[:8], "little")
                row = (number, member.offset_data, member.size, label, digest)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
                names += os.fsencode(member.name) + b"\0"
            if shard_stamp(file) != stamp:
                raise ShardError(f"the shard {path} changes; start again when it is complete", code="data-changed")
        skipped += (f"{path}: {reason}" for reason in reasons)
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            done = f"{number + 1} of {pluralize(len(paths), 'shard')}"
            print(f"indexing {printable(os.path.dirname(path))} once: {done}", file=sys.stderr, flush=True)  # noqa: PTH120
    arrays = {column: np.array(values) for column, values in columns.items()}
    return TarIndex(np.array(stamps, np.int64), names=bytes(names), skipped=tuple(skipped), **arrays)


def _read_samples(path: str, file: BinaryIO, skipped: list[str]) -> Iterator[tuple[str, tarfile.TarInfo, int]]:
    """Yield the key, the image and the label of each sample of a shard. `skipped` gets what is unusable, with the
    reason. Raises ShardError."""
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as archive:
            for key, members in groupby(_regular_files(archive, skipped), lambda member: split_key(member.name)[0]):
                if key is None:
                    continue
                sample: dict[str, tarfile.TarInfo] = {}
                for member in members:
                    if (extension := split_key(member.name)[1]) in sample:
                        reason = f"contains {printable(member.name)} twice; make the key of each sample unique"
                        raise ShardError(f"the shard {path} {reason}", code="duplicate-key")
                    sample[extension] = member
                images = [member for extension, member in sample.items() if extension in IMAGE_EXTENSIONS]
                if len(images) != 1:
                    reason = f"a sample with {len(images)} images" if images else "a sample without image"
                    skipped.append(f"{printable(key)} ({reason})")
                elif images[0].size > MAX_IMAGE_BYTES:
                    reason = f"a file of more than {MAX_IMAGE_BYTES >> 20} MiB; reduce its size"
                    skipped.append(f"{printable(images[0].name)} ({reason})")
                else:
                    yield key, images[0], _read_label(path, file, images[0], sample)
            # tarfile takes a damaged header, and the end of a truncated file, for the end of the archive.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"neither a header nor the end at byte {archive.offset}")
    # tarfile raises ValueError for invalid numbers of a sparse file, RecursionError for many headers of one member.
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, EOFError) as error:
        reason = f"is no tar archive, or is damaged or compressed ({decode_error_reason(error)})"
        raise ShardError(f"the shard {path} {reason}; copy it again, or decompress it", code="damaged") from error


def _regular_files(archive: tarfile.TarFile, skipped: list[str]) -> Iterator[tarfile.TarInfo]:
    """Yield the members with content. `skipped` gets links, devices, pipes and sparse files."""
    for member in archive:
        if member.isreg() and not member.issparse():
            yield member
        elif not member.isdir():
            skipped.append(f"{printable(member.name)} ({'a sparse' if member.isreg() else 'not a regular'} file)")


def _read_label(path: str, file: BinaryIO, image: tarfile.TarInfo, sample: dict[str, tarfile.TarInfo]) -> int:
    """Return the class index of a sample, from its .cls or .json file. Raises ShardError."""
    member = sample.get("cls") or sample.get("json")
    if member is None:
        advice = "add a .cls file with its class index, or a .json file with label, directly before or behind it"
        reason = f"contains {printable(image.name)} without a label; {advice}"
        raise ShardError(f"the shard {path} {reason}", code="bad-label")
    file.seek(member.offset_data)
    text = file.read(min(member.size, MAX_LABEL_BYTES)).strip().decode("utf-8", "replace")
    if member is sample.get("json"):
        # Not the codec: Python's json writes NaN and lone surrogates, which the metadata of crawled datasets contain.
        with suppress(ValueError, RecursionError):
            values = json.loads(text)
            label = values.get("label") if isinstance(values, dict) else None
            text = str(label) if type(label) is int else ""
    # At most 10 digits: int() refuses more than 4,300.
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_LABEL:
        return int(text)
    reason = f"contains {printable(member.name)} without the class index, an integer from 0 on"
    raise ShardError(f"the shard {path} {reason}", code="bad-label")


def split_key(name: str) -> tuple[str | None, str]:
    """Return the key and the extension in lower case of a member, as WebDataset does; no key if it is no sample."""
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    # Such as __index__.json, which describes the shard.
    if not stem or not dot or (stem.startswith("__") and stem.endswith("__")):
        return None, ""
    return f"{folder}{slash}{stem}", extension.lower()
