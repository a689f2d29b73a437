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

FORMAT = 1
LIBRARIES = ("pillow", "torch", "torchvision")
KEPT_DAYS = 30.0
_DAY = 86400.0


@dataclass(frozen=True)
class Fresh:
    """Images as they are decoded, N x C x H x W in `shape`, a piece after another; `about` is complete after the last
    one, and goes into JSON."""

    shape: tuple[int, ...]
    pieces: Iterable[Images]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decoded:
    """Images, N x C x H x W, not to be written to; `problem` is why they could not be kept, where they could not."""

    images: Images
    about: Mapping[str, Any]
    problem: str | None = None


def key_of(what: Mapping[str, Any], files: Iterable[Path], root: Path) -> str:
    """Of the images that come of those files: another one where a file was changed, or a library that decodes and
    resizes. Raises OSError."""
    versions = [version(library) for library in LIBRARIES]
    digest = hashlib.sha256(json.dumps([FORMAT, versions, str(root.resolve()), dict(what)]).encode())
    for path in files:
        status = path.stat()
        name = os.fsencode(path.relative_to(root))
        digest.update(b"\0%s\0%d\0%d" % (name, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:24]


def is_kept(key: str) -> bool:
    return _kept(key) is not None


def kept_or_decoded(
    key: str, decode: Callable[[], Fresh], sound: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> Decoded:
    """The images of a key from the cache, or decoded and put there by the first process that asks while the others
    wait. What is there is taken if it is whole and `sound` says so. Where it cannot be kept it is decoded into this
    process's memory."""

    def take() -> Decoded | None:
        found = _kept(key)
        if found is None or not sound(found.about):
            return None
        with suppress(OSError):
            os.utime(_about_path(key))
        return found

    # Without the lock first: the folder may be one that can only be read.
    if (found := take()) is not None:
        return found
    try:
        with _alone(key):
            if (found := take()) is not None:
                return found
            _remove_old()
            _remove_torn(key)
            _write(key, decode())
            found = _kept(key)
        if found is not None:
            return found
        problem = "it was gone at once"
    except OSError as error:
        problem = error.strerror or str(error)
    fresh, first = decode(), 0
    images = np.empty(fresh.shape, np.uint8)
    for piece in fresh.pieces:
        images[first : first + len(piece)] = piece
        first += len(piece)
    return Decoded(images, fresh.about, f"decoded images {_not_kept(problem)}")


def why_not_kept(size: int) -> str | None:
    """Why so many bytes more cannot be kept, as a clause about them; None where they can."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=_folder()) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except OSError as error:
        return _not_kept(error.strerror or str(error))
    return None


def _not_kept(problem: str) -> str:
    return f"cannot be kept in {_folder()} ({problem})"


def _folder() -> Path:
    return cache_folder() / "decoded"


def _images_path(key: str) -> Path:
    return _folder() / f"{key}.npy"


def _about_path(key: str) -> Path:
    """When it was last touched is when the images were last used."""
    return _folder() / f"{key}.json"


@contextmanager
def _alone(key: str) -> Iterator[None]:
    """One process at a time. Raises OSError."""
    _folder().mkdir(parents=True, exist_ok=True)
    with (_folder() / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kept(key: str) -> Decoded | None:
    """What is in the cache; None where that is not what was written there, byte for byte as far as size and time of
    change tell."""
    path, about = _images_path(key), read_json(_about_path(key))
    if about is None:
        return None
    try:
        status = path.stat()
        if [status.st_size, status.st_mtime_ns] != about["file"]:
            return None
        images = np.load(path, mmap_mode="r", allow_pickle=False)
        if images.dtype != np.uint8 or list(images.shape) != about["shape"]:
            return None
        return Decoded(np.asarray(images), about["about"])
    except (OSError, ValueError, KeyError, EOFError, SyntaxError):
        return None


def _write(key: str, fresh: Fresh) -> None:
    """The JSON comes last: without it there is nothing. Raises OSError."""
    path = _images_path(key)

    def write(file: Any) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": fresh.shape}
        np.lib.format.write_array_header_1_0(file, header)
        # Where there is no room it is known before anything is decoded.
        os.posix_fallocate(file.fileno(), 0, file.tell() + math.prod(fresh.shape))
        for piece in fresh.pieces:
            file.write(np.ascontiguousarray(piece).data)

    replace_file(path, write, durable=True)
    status = path.stat()
    file = [status.st_size, status.st_mtime_ns]
    write_json(_about_path(key), {"file": file, "shape": list(fresh.shape), "about": fresh.about})


def _remove_old() -> None:
    """What no run has used for long."""
    with suppress(OSError):
        now = time.time()
        for path in _folder().iterdir():
            about = path.with_suffix(".json") if path.suffix == ".npy" else path
            with suppress(OSError):
                if not about.exists():
                    about = path
                if now - about.stat().st_mtime > KEPT_DAYS * _DAY:
                    path.unlink()


def _remove_torn(key: str) -> None:
    """What a process left behind that was killed while it wrote; only for who is alone with the key. Raises OSError."""
    for path in _folder().glob(f".{key}.*.tmp"):
        path.unlink(missing_ok=True)
