"""Indices of WebDataset shards in the user's cache. Each is made once, and again if its shard has changed.

An index is read into arrays of the whole dataset, so that no other memory is used. `engine.data.sources.webdataset`
calls this module.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.image_file import MAX_IMAGE_BYTES
from engine.data.sources.tar_headers import ShardError
from engine.data.sources.tar_index import (
    COLUMNS,
    IMAGE_EXTENSIONS,
    ShardIndex,
    ShardStamp,
    build_index,
    open_shard,
)
from engine.utils.codec import ENTRIES, Count, FileRecord, InvalidRecordError, decode, encode
from engine.utils.files import (
    cache_folder,
    delete_oldest_files,
    make_user_folder,
    open_regular_file,
    read_bytes,
    replace_file,
    user_path_problem,
)

INDEX_FOLDER = "shards"
INDEX_SUFFIXES = (".index", ".names")
# Part of the file name of an index: another version of gputrain may know other members or labels.
INDEX_FORMAT = 1
MAX_INDEX_BYTES = 1 << 29
# All indices together. ImageNet takes 60 MB.
MAX_TOTAL_BYTES = 1 << 30
# Other processes may still need an index that they have just found or made. Later they need its names at most, and make
# the index again if it is gone.
SPARE_SECONDS = 3600.0
# The line of JSON in an index: mainly the skipped members. An escaped byte takes up to 10 characters.
MAX_HEADER_BYTES = 1 << 24
DIGEST_CHARS = 64


@dataclass(frozen=True)
class IndexedShard:
    """A shard whose index is in the user's cache. `index` is the index itself if the cache cannot be written; `is_new`
    is whether it was written now."""

    path: str
    stamp: ShardStamp
    num_images: int
    skipped: tuple[str, ...]
    index: ShardIndex | None = None
    is_new: bool = False


class IndexHeader(FileRecord, frozen=True, kw_only=True):
    """The first line of an index. `stamp` identifies the content of the shard, `names_sha256` the file of names."""

    stamp: str
    images: Count
    skipped: Annotated[tuple[str, ...], ENTRIES]
    names_sha256: str


def index_shard(path: str) -> IndexedShard:
    """Make the index of a shard unless it is in the user's cache. Raises ShardError and OSError."""
    fd = open_shard(path)
    try:
        stamp = ShardStamp.of(fd)
        if (header := _read_header(path, stamp)) is not None:
            return IndexedShard(path, stamp, header.images, header.skipped)
        index = build_index(fd, stamp)
    finally:
        os.close(fd)
    try:
        _write(path, stamp, index)
    except OSError:
        return IndexedShard(path, stamp, len(index.sizes), index.skipped, index)
    return IndexedShard(path, stamp, len(index.sizes), index.skipped, is_new=True)


def delete_unused_indices() -> None:
    """Delete the indices that were not used for longest if all together exceed `MAX_TOTAL_BYTES`."""
    with suppress(OSError):
        delete_oldest_files(cache_folder() / INDEX_FOLDER, "*", MAX_TOTAL_BYTES, spare_seconds=SPARE_SECONDS)


def read_columns(shard: IndexedShard, columns: Mapping[str, NDArray[Any]]) -> None:
    """Fill arrays of `shard.num_images` elements, some of the `COLUMNS`. Raises ShardError and OSError."""
    if shard.index is None and _fill(shard, columns):
        return
    index = shard.index or _build_again(shard)
    for name, column in columns.items():
        column[:] = getattr(index, name)


def read_names(shard: IndexedShard) -> list[bytes]:
    """Return the names of the image members. Raises ShardError and OSError."""
    names = shard.index.names if shard.index is not None else _read_names(shard)
    if names is None:
        names = _build_again(shard).names
    return names.split(b"\0")[:-1]


def _build_again(shard: IndexedShard) -> ShardIndex:
    """Replace a damaged index."""
    fd = open_shard(shard.path)
    try:
        if ShardStamp.of(fd) != shard.stamp:
            raise ShardError("has changed since it was indexed", code="data-changed")
        index = build_index(fd, shard.stamp)
    finally:
        os.close(fd)
    with suppress(OSError):
        _write(shard.path, shard.stamp, index)
    return index


def _file_name(path: str) -> str:
    key = os.fsencode(f"{os.path.realpath(path)}\0{INDEX_FORMAT}\0{sorted(IMAGE_EXTENSIONS)}\0{MAX_IMAGE_BYTES}")
    return f"{INDEX_FOLDER}/{hashlib.sha256(key).hexdigest()[:24]}"


def _open(path: str) -> BinaryIO:
    """Open the index of a shard. Raises OSError, also if other users can change it."""
    name = f"{_file_name(path)}.index"
    if (problem := user_path_problem(cache_folder(), name)) is not None:
        raise PermissionError(problem)
    return open_regular_file(cache_folder() / name, MAX_INDEX_BYTES)


def _parse_header(line: bytes, stamp: ShardStamp, file_bytes: int) -> IndexHeader | None:
    """Return the header of an index; None if it is not that of the shard, or the file is incomplete."""
    try:
        header = decode(line, IndexHeader)
    except InvalidRecordError:
        return None
    if header.stamp != _stamp_text(stamp):
        return None
    row_bytes = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
    return header if file_bytes == DIGEST_CHARS + len(line) + header.images * row_bytes else None


def _stamp_text(stamp: ShardStamp) -> str:
    # Not as numbers: inodes have 64 bits.
    return f"{stamp.size} {stamp.mtime_ns} {stamp.inode}"


def _read_header(path: str, stamp: ShardStamp) -> IndexHeader | None:
    try:
        with _open(path) as file:
            file.seek(DIGEST_CHARS)
            header = _parse_header(file.readline(MAX_HEADER_BYTES), stamp, os.fstat(file.fileno()).st_size)
    except OSError:
        return None
    if header is not None:
        _mark_used(path)
    return header


def _mark_used(path: str) -> None:
    for suffix in INDEX_SUFFIXES:
        with suppress(OSError):
            os.utime(cache_folder() / f"{_file_name(path)}{suffix}", follow_symlinks=False)


def _fill(shard: IndexedShard, columns: Mapping[str, NDArray[Any]]) -> bool:
    """Read columns of an index that is intact; else returns False."""
    digest = hashlib.sha256()
    try:
        with _open(shard.path) as file:
            expected, line = file.read(DIGEST_CHARS), file.readline(MAX_HEADER_BYTES)
            header = _parse_header(line, shard.stamp, os.fstat(file.fileno()).st_size)
            if header is None or header.images != shard.num_images:
                return False
            digest.update(line)
            for name, kind in COLUMNS.items():
                column = columns[name] if name in columns else np.empty(shard.num_images, kind)
                file.readinto(column.data.cast("B"))  # type: ignore[attr-defined]
                digest.update(column.data)
    except OSError:
        return False
    return digest.hexdigest().encode() == expected


def _read_names(shard: IndexedShard) -> bytes | None:
    name = f"{_file_name(shard.path)}.names"
    header = _read_header(shard.path, shard.stamp)
    if header is None or user_path_problem(cache_folder(), name) is not None:
        return None
    try:
        names = read_bytes(cache_folder() / name, MAX_INDEX_BYTES)
    except OSError:
        return None
    return names if hashlib.sha256(names).hexdigest() == header.names_sha256 else None


def _write(path: str, stamp: ShardStamp, index: ShardIndex) -> None:
    """Write the names, then the index: a SHA-256, a line of JSON and the columns. Raises OSError."""
    header = IndexHeader(
        stamp=_stamp_text(stamp),
        images=len(index.sizes),
        skipped=index.skipped,
        names_sha256=hashlib.sha256(index.names).hexdigest(),
    )
    content = encode(header) + b"\n" + b"".join(getattr(index, name).tobytes() for name in COLUMNS)
    make_user_folder(cache_folder(), INDEX_FOLDER)
    target = cache_folder() / _file_name(path)
    replace_file(target.with_suffix(".names"), lambda file: file.write(index.names))
    digest = hashlib.sha256(content).hexdigest().encode()
    replace_file(target.with_suffix(".index"), lambda file: file.write(digest + content))
