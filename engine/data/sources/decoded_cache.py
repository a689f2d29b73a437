"""Decoded images that outlive the process which decoded them: one raw array a set in the user's cache, of which all
ranks map the same pages, and a JSON file beside it with what else is to be known."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from engine.data.sources.base import Images
from engine.utils.files import cache_folder, read_json, replace_file, write_json

CACHE_FORMAT = 1
KEY_LIBRARIES = ("pillow", "torch", "torchvision")
MAX_UNUSED_DAYS = 30.0
_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class DecodedChunks:
    """Images as they are decoded, N x C x H x W in `shape`, a piece after another; `metadata` is complete after the
    last one, and goes into JSON."""

    shape: tuple[int, ...]
    chunks: Iterable[Images]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodedImages:
    """Images, N x C x H x W, not to be written to; `warning` is why they could not be kept, where they could not."""

    images: Images
    metadata: Mapping[str, Any]
    warning: str | None = None


def compute_cache_key(parameters: Mapping[str, Any], files: Iterable[Path], root: Path) -> str:
    """Of the images that come of those files: another one where a file was changed, or a library that decodes and
    resizes. Raises OSError."""
    versions = [version(library) for library in KEY_LIBRARIES]
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, versions, str(root.resolve()), dict(parameters)]).encode())
    for path in files:
        status = path.stat()
        name = os.fsencode(path.relative_to(root))
        digest.update(b"\0%s\0%d\0%d" % (name, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:24]


def is_cached(key: str) -> bool:
    return _read_cached(key) is not None


def load_or_decode(
    key: str, decode: Callable[[], DecodedChunks], is_valid: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> DecodedImages:
    """The images of a key from the cache, or decoded and put there by the first process that asks while the others
    wait. What is there is taken if it is whole and `is_valid` says so. Where it cannot be kept it is decoded into this
    process's memory."""

    def take() -> DecodedImages | None:
        found = _read_cached(key)
        if found is None or not is_valid(found.metadata):
            return None
        with suppress(OSError):
            os.utime(_metadata_path(key))
        return found

    # Without the lock first: the folder may be one that can only be read.
    if (found := take()) is not None:
        return found
    try:
        with _exclusive_lock(key):
            if (found := take()) is not None:
                return found
            _remove_unused()
            _remove_partial(key)
            _write_cached(key, decode())
            found = _read_cached(key)
        if found is not None:
            return found
        problem = "it was gone at once"
    except OSError as error:
        problem = error.strerror or str(error)
    fresh, first = decode(), 0
    images = np.empty(fresh.shape, np.uint8)
    for piece in fresh.chunks:
        images[first : first + len(piece)] = piece
        first += len(piece)
    return DecodedImages(images, fresh.metadata, f"decoded images {_not_cached(problem)}")


def cache_write_problem(size_bytes: int) -> str | None:
    """Why so many bytes more cannot be kept, as a clause about them; None where they can."""
    try:
        _decoded_folder().mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=_decoded_folder()) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, max(size_bytes, 1))
    except OSError as error:
        return _not_cached(error.strerror or str(error))
    return None


def _not_cached(problem: str) -> str:
    return f"cannot be kept in {_decoded_folder()} ({problem})"


def _decoded_folder() -> Path:
    return cache_folder() / "decoded"


def _images_path(key: str) -> Path:
    return _decoded_folder() / f"{key}.npy"


def _metadata_path(key: str) -> Path:
    """When it was last touched is when the images were last used."""
    return _decoded_folder() / f"{key}.json"


@contextmanager
def _exclusive_lock(key: str) -> Iterator[None]:
    """One process at a time. Raises OSError."""
    _decoded_folder().mkdir(parents=True, exist_ok=True)
    with (_decoded_folder() / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_cached(key: str) -> DecodedImages | None:
    """What is in the cache; None where that is not what was written there, byte for byte as far as size and time of
    change tell."""
    path, about = _images_path(key), read_json(_metadata_path(key))
    if about is None:
        return None
    try:
        status = path.stat()
        if [status.st_size, status.st_mtime_ns] != about["file"]:
            return None
        images = np.load(path, mmap_mode="r", allow_pickle=False)
        if images.dtype != np.uint8 or list(images.shape) != about["shape"]:
            return None
        return DecodedImages(np.asarray(images), about["about"])
    except (OSError, ValueError, KeyError, EOFError, SyntaxError):
        return None


def _write_cached(key: str, decoded: DecodedChunks) -> None:
    """The JSON comes last: without it there is nothing. Raises OSError."""
    path = _images_path(key)

    def write(file: Any) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": decoded.shape}
        np.lib.format.write_array_header_1_0(file, header)
        # Where there is no room it is known before anything is decoded.
        os.posix_fallocate(file.fileno(), 0, file.tell() + math.prod(decoded.shape))
        for piece in decoded.chunks:
            file.write(np.ascontiguousarray(piece).data)

    replace_file(path, write, durable=True)
    status = path.stat()
    file = [status.st_size, status.st_mtime_ns]
    write_json(_metadata_path(key), {"file": file, "shape": list(decoded.shape), "about": decoded.metadata})


def _remove_unused() -> None:
    """What no run has used for long."""
    with suppress(OSError):
        now = time.time()
        for path in _decoded_folder().iterdir():
            about = path.with_suffix(".json") if path.suffix == ".npy" else path
            with suppress(OSError):
                if not about.exists():
                    about = path
                if now - about.stat().st_mtime > MAX_UNUSED_DAYS * _DAY_SECONDS:
                    path.unlink()


def _remove_partial(key: str) -> None:
    """What a process left behind that was killed while it wrote; only for who is alone with the key. Raises OSError."""
    for path in _decoded_folder().glob(f".{key}.*.tmp"):
        path.unlink(missing_ok=True)
