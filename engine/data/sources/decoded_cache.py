"""Disk cache of decoded images in the user's cache folder, shared by ranks and runs.

An entry is a .npy file, which all ranks map into memory, and a .json file with the metadata. The sources of torchvision
datasets and `engine.data.pipelines.in_memory_images` use it.

Each process that loads an entry verifies its checksum once, before it uses the images, at 6 GiB/s per thread. An entry
that a disk error or another program has changed is decoded again. A change while the images are mapped is not noticed.
The checksum does not protect from someone who changes both files; only this user can (`user_path_problem`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from engine.data.sampler import Part
from engine.data.sources.base import Images
from engine.utils.codec import Count, FileRecord, Integer, Meta, Record, encode, field, find_user_record, write_record
from engine.utils.errors import Problem
from engine.utils.files import (
    cache_folder,
    exclusive_lock,
    make_user_folder,
    open_regular_file,
    own_folder_advice,
    replace_file,
    user_path_problem,
)
from engine.utils.host import available_cores
from engine.utils.libraries import installed_version

DECODED_FOLDER = "decoded"
CACHE_FORMAT = 1
PAGE_BYTES = 4096
# Bytes that one thread checks at a time, a multiple of PAGE_BYTES.
CHECKED_BYTES = 64 << 20
# Memory bandwidth limits the checksum: more threads are not faster.
MAX_CHECK_THREADS = 4
# The metadata hold the label of each image, and the reason for each that is unreadable.
MAX_METADATA_BYTES = 1 << 26
KEY_LIBRARIES = ("pillow", "simplejpeg", "torch", "torchvision")
MAX_UNUSED_DAYS = 30.0
_DAY_SECONDS = 86400.0


class DecodedMetadata(Record, frozen=True, kw_only=True):
    """What is known about decoded images, each as far as their source needs it.

    `unread` is why images are unreadable, by row; `reduced` are the rows of the images that were decoded at reduced
    scale. `labels` are the class indices of each part, and `classes` the class names.
    """

    unread: dict[Count, str] = field(default_factory=dict)
    reduced: tuple[Count, ...] = ()
    labels: dict[Part, tuple[Count, ...]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


class CacheEntry(FileRecord, frozen=True, kw_only=True):
    """The .json file of an entry. Size and modification time are those of its .npy file."""

    size_bytes: Count
    mtime_ns: Integer
    shape: Annotated[tuple[Count, ...], Meta(min_length=4, max_length=4)]
    checksum: str
    metadata: DecodedMetadata


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


def compute_cache_key(parameters: Mapping[str, Any], files: Iterable[Path], root: Path) -> str:
    """Return a cache key from parameters, file names, sizes and modification times, and library versions.

    The key changes with a file, or with a library that decodes or resizes images. Raises OSError.
    """
    return cache_key_of_stamps(parameters, (file_stamp(path, root) for path in files), str(root.resolve()))


def cache_key_of_stamps(parameters: Mapping[str, Any], stamps: Iterable[bytes], root: str) -> str:
    """Return a cache key from parameters, the stamp of each image, what holds the images, and library versions."""
    # Without simplejpeg, Pillow decodes.
    versions = [installed_version(library) for library in KEY_LIBRARIES]
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, versions, root, dict(parameters)]).encode())
    for stamp in stamps:
        digest.update(b"\0" + stamp)
    return digest.hexdigest()[:24]


def file_stamp(path: Path, root: Path) -> bytes:
    """Return name, size and modification time of a file below `root`. Raises OSError."""
    status = path.stat()
    return b"%s\0%d\0%d" % (os.fsencode(path.relative_to(root)), status.st_size, status.st_mtime_ns)


def is_cached(key: str) -> bool:
    """Whether the cache has an entry for a key. Its checksum is not verified."""
    return _read_cached(key, verify=False) is not None


def load_or_decode(
    key: str, decode: Callable[[], DecodedChunks], is_valid: Callable[[DecodedMetadata], bool] = lambda _: True
) -> DecodedImages:
    """Return the cached images of a key, or decode and cache them.

    One process decodes while the others wait for a file lock. An entry is used if it is intact and `is_valid` accepts
    its metadata. If the cache cannot be written, the images are decoded into the memory of this process, with a
    warning.
    """

    def read_valid() -> DecodedImages | None:
        cached = _read_cached(key, verify=True)
        if cached is None or not is_valid(cached.metadata):
            return None
        with suppress(OSError):
            os.utime(_metadata_path(key))
        return cached

    # Read without the lock first: the folder may be read-only.
    if (cached := read_valid()) is not None:
        return cached
    try:
        with exclusive_lock(make_user_folder(cache_folder(), DECODED_FOLDER) / f"{key}.lock", private=True):
            if (cached := read_valid()) is not None:
                return cached
            _remove_unused()
            _remove_partial(key)
            _write_cached(key, decode())
            cached = _read_cached(key, verify=False)
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
    warning = Problem("", f"decoded images {_not_cached(problem)}", code="not-writable")
    return DecodedImages(images, decoded.metadata(), warning)


def cache_write_problem(size_bytes: int) -> str | None:
    """Return why an entry of this size cannot be cached, as a clause that follows its subject; None if it can."""
    try:
        with TemporaryFile(dir=make_user_folder(cache_folder(), DECODED_FOLDER)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, max(size_bytes, 1))
    except OSError as error:
        return _not_cached(error.strerror or str(error))
    return None


def _not_cached(problem: str) -> str:
    if (foreign := user_path_problem(cache_folder(), DECODED_FOLDER)) is not None:
        return f"cannot be cached: {foreign}; {own_folder_advice('XDG_CACHE_HOME')}"
    return f"cannot be cached in {_decoded_folder()} ({problem})"


def _decoded_folder() -> Path:
    return cache_folder() / DECODED_FOLDER


def _images_path(key: str) -> Path:
    return _decoded_folder() / f"{key}.npy"


def _metadata_path(key: str) -> Path:
    """Path of the metadata. Its modification time is the last use of the entry."""
    return _decoded_folder() / f"{key}.json"


def _read_cached(key: str, *, verify: bool) -> DecodedImages | None:
    """Return the entry of a key; None if it is missing, if other users can change it, or if its size, header or
    modification time differs from what was written, with `verify` also its checksum. Without a checksum it counts as
    missing."""
    path = _images_path(key)
    entry = find_user_record(cache_folder(), f"{DECODED_FOLDER}/{key}.json", CacheEntry, MAX_METADATA_BYTES)
    if entry is None or user_path_problem(cache_folder(), f"{DECODED_FOLDER}/{key}.npy") is not None:
        return None
    try:
        # Compared instead of parsed: numpy's parser raises many exception types for a damaged header.
        header = _array_header(entry.shape)
        with open_regular_file(path) as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (entry.size_bytes, entry.mtime_ns):
                return None
            if file.read(len(header)) != header or status.st_size != len(header) + math.prod(entry.shape):
                return None
            images = np.memmap(file, np.uint8, "r", len(header), entry.shape)
        if verify and _checksum(images, entry.metadata) != entry.checksum:
            return None
        return DecodedImages(np.asarray(images), entry.metadata)
    except (OSError, ValueError):
        return None


def _array_header(shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file with an array of uint8."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return header.getvalue()


def _checksum(images: Images, metadata: DecodedMetadata) -> str:
    """Return a hash of the metadata and of the sum of the 64-bit words of each page of the images.

    The sums take a sixth of the time of CRC-32. They miss only errors in one page that cancel each other.
    """
    digest = hashlib.blake2b(encode(metadata), digest_size=16)
    flat = np.asarray(images).reshape(-1)
    tail = flat[len(flat) // PAGE_BYTES * PAGE_BYTES :]
    blocks = [flat[start : start + CHECKED_BYTES] for start in range(0, len(flat) - len(tail), CHECKED_BYTES)]
    with ThreadPoolExecutor(min(MAX_CHECK_THREADS, available_cores())) as pool:
        for sums in pool.map(_page_sums, blocks):
            digest.update(sums.tobytes())
    digest.update(tail.tobytes())
    return digest.hexdigest()


def _page_sums(block: Images) -> NDArray[np.uint64]:
    """Return the sum of the 64-bit words of each complete page, modulo 2**64."""
    pages = block[: len(block) // PAGE_BYTES * PAGE_BYTES].view(np.uint64).reshape(-1, PAGE_BYTES // 8)
    sums: NDArray[np.uint64] = pages.sum(1)
    return sums


def _write_cached(key: str, decoded: DecodedChunks) -> None:
    """Write an entry, the metadata last: an entry without metadata does not exist. Raises OSError."""
    path = _images_path(key)

    def write(file: Any) -> None:
        file.write(_array_header(decoded.shape))
        # Fail on a full disk before anything is decoded.
        os.posix_fallocate(file.fileno(), 0, file.tell() + math.prod(decoded.shape))
        for chunk in decoded.chunks:
            file.write(np.ascontiguousarray(chunk).data)

    replace_file(path, write, durable=True)
    status, metadata = path.stat(), decoded.metadata()
    entry = CacheEntry(
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        shape=decoded.shape,
        checksum=_checksum(np.load(path, mmap_mode="r", allow_pickle=False), metadata),
        metadata=metadata,
    )
    write_record(_metadata_path(key), entry)


def _remove_unused() -> None:
    """Remove all entries that have not been used for `MAX_UNUSED_DAYS`."""
    with suppress(OSError):
        now = time.time()
        for path in _decoded_folder().iterdir():
            last_use = path.with_suffix(".json") if path.suffix == ".npy" else path
            with suppress(OSError):
                if not last_use.exists():
                    last_use = path
                if now - last_use.stat().st_mtime > MAX_UNUSED_DAYS * _DAY_SECONDS:
                    path.unlink()


def _remove_partial(key: str) -> None:
    """Remove temporary files of killed writers. The caller must hold the lock of the key. Raises OSError."""
    for path in _decoded_folder().glob(f".{key}.*.tmp"):
        path.unlink(missing_ok=True)
