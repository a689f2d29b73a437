"""Disk cache of decoded images in the user's cache folder, shared by ranks and runs.

An entry is a .npy file, which all ranks map into memory, and a .json file with the metadata. The sources of torchvision
datasets and `engine.train.data.decoded` use it. Only this user can change an entry (`user_path_problem`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from engine.base.codec import ENTRIES, Count, FileRecord, field, find_user_record, write_record
from engine.base.errors import Problem
from engine.base.files import (
    cache_folder,
    exclusive_lock,
    make_user_folder,
    own_folder_advice,
    replace_file,
    user_path_problem,
)
from engine.base.libraries import installed_version
from engine.train.data.sampler import Part
from engine.train.data.sources.base import Images

DECODED_FOLDER = "decoded"
CACHE_FORMAT = 3
# The metadata hold the label of each image, and the reason for each that is unreadable.
MAX_METADATA_BYTES = 1 << 26
KEY_LIBRARIES = ("pillow", "simplejpeg", "torch", "torchvision")
MAX_UNUSED_DAYS = 30.0
_DAY_SECONDS = 86400.0


class DecodedMetadata(FileRecord, frozen=True, kw_only=True):
    """The .json file of an entry: what is known about the images, each as far as their source needs it.

    `unread` is why images are unreadable, by row. `labels` are the class indices of each part, and `classes` the class
    names.
    """

    unread: Annotated[dict[Count, str], ENTRIES] = field(default_factory=dict)
    labels: Annotated[dict[Part, Annotated[tuple[Count, ...], ENTRIES]], ENTRIES] = field(default_factory=dict)
    classes: Annotated[tuple[str, ...], ENTRIES] = ()


@dataclass(frozen=True)
class DecodedChunks:
    """Decoded images as a stream: chunks of an N x C x H x W uint8 array of `shape`.

    `metadata` is called after the last chunk.
    """

    shape: tuple[int, ...]
    chunks: Iterable[Images]
    metadata: Callable[[], DecodedMetadata] = DecodedMetadata


@dataclass(frozen=True)
class DecodedImages:
    """Decoded images, N x C x H x W uint8, read-only if cached. `warning` says why they could not be cached."""

    images: Images
    metadata: DecodedMetadata
    warning: Problem | None = None


def compute_cache_key(parameters: Mapping[str, Any], stamps: Iterable[bytes], root: str) -> str:
    """Return a cache key from parameters, the stamp of each file, what holds them, and library versions.

    The key changes with a file, or with a library that decodes or resizes images. Raises OSError.
    """
    versions = [installed_version(library) for library in KEY_LIBRARIES]
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, versions, root, dict(parameters)]).encode())
    for stamp in stamps:
        digest.update(b"\0" + stamp)
    return digest.hexdigest()[:24]


def file_stamp(path: Path, root: Path) -> bytes:
    """Return name, size and modification time of a file below `root`. Raises OSError."""
    status = path.stat()
    return b"%s\0%d\0%d" % (os.fsencode(path.relative_to(root)), status.st_size, status.st_mtime_ns)


def load_or_decode(
    key: str, decode: Callable[[], DecodedChunks], is_valid: Callable[[DecodedMetadata], bool] = lambda _: True
) -> DecodedImages:
    """Return the cached images of a key, or decode and cache them.

    One process decodes while the others wait for a file lock. An entry is used if `is_valid` accepts its metadata. If
    the cache cannot be written, the images are decoded into the memory of this process, with a warning.
    """

    def read_valid() -> DecodedImages | None:
        cached = read_cached(key)
        if cached is None or not is_valid(cached.metadata):
            return None
        with suppress(OSError):
            os.utime(_path(key, ".json"))
        return cached

    # Read without the lock first: the folder may be read-only.
    if (cached := read_valid()) is not None:
        return cached
    try:
        with exclusive_lock(make_user_folder(cache_folder(), DECODED_FOLDER) / f"{key}.lock", private=True):
            if (cached := read_valid()) is not None:
                return cached
            _remove_unused()
            _write_cached(key, decode())
            cached = read_cached(key)
        if cached is not None:
            return cached
        problem = "the entry disappeared after it was written"
    except OSError as error:
        problem = error.strerror or str(error)
    decoded, start = decode(), 0
    images = np.empty(decoded.shape, np.uint8)
    for chunk in decoded.chunks:
        images[start : start + len(chunk)] = chunk
        start += len(chunk)
    if (foreign := user_path_problem(cache_folder(), DECODED_FOLDER)) is not None:
        reason = f"decoded images cannot be cached: {foreign}; {own_folder_advice('XDG_CACHE_HOME')}"
    else:
        reason = f"decoded images cannot be cached in {cache_folder() / DECODED_FOLDER} ({problem})"
    return DecodedImages(images, decoded.metadata(), Problem("", reason, code="not-writable"))


def _path(key: str, suffix: str) -> Path:
    """Return the path of the images (.npy) or of the metadata (.json), whose modification time is the last use."""
    return cache_folder() / DECODED_FOLDER / f"{key}{suffix}"


def read_cached(key: str) -> DecodedImages | None:
    """Return the entry of a key; None if it is missing or damaged, or if other users can change it."""
    metadata = find_user_record(cache_folder(), f"{DECODED_FOLDER}/{key}.json", DecodedMetadata, MAX_METADATA_BYTES)
    if metadata is None or user_path_problem(cache_folder(), f"{DECODED_FOLDER}/{key}.npy") is not None:
        return None
    # numpy raises many exception types for a damaged header.
    with suppress(Exception):
        images = np.load(_path(key, ".npy"), mmap_mode="r", allow_pickle=False)
        if images.dtype == np.uint8 and images.ndim == 4:
            return DecodedImages(np.asarray(images), metadata)
    return None


def _write_cached(key: str, decoded: DecodedChunks) -> None:
    """Write an entry, the metadata last: an entry without metadata does not exist. Raises OSError."""

    def write(file: Any) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": decoded.shape}
        np.lib.format.write_array_header_1_0(file, header)
        # Fail on a full disk before anything is decoded.
        os.posix_fallocate(file.fileno(), 0, file.tell() + math.prod(decoded.shape))
        for chunk in decoded.chunks:
            file.write(np.ascontiguousarray(chunk).data)

    replace_file(_path(key, ".npy"), write, durable=True)
    write_record(_path(key, ".json"), decoded.metadata())


def _remove_unused() -> None:
    """Remove all entries, and files of killed writers, that have not been used for `MAX_UNUSED_DAYS`."""
    with suppress(OSError):
        now = time.time()
        for path in (cache_folder() / DECODED_FOLDER).iterdir():
            last_use = path.with_suffix(".json") if path.suffix == ".npy" else path
            with suppress(OSError):
                if not last_use.exists():
                    last_use = path
                if now - last_use.stat().st_mtime > MAX_UNUSED_DAYS * _DAY_SECONDS:
                    path.unlink()
