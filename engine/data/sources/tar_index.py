"""Index of a WebDataset shard: where its images are, and their labels.

A sample consists of consecutive members with the same key, the path up to the first dot of the file name:
`dog/0001.jpg` and `dog/0001.cls`. `engine.data.sources.tar_index_cache` keeps the index.

https://github.com/webdataset/webdataset#the-webdataset-format
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.image_file import MAX_IMAGE_BYTES
from engine.data.sources.tar_headers import BLOCK_BYTES, ShardError, TarMember, TarReader
from engine.utils.text import printable

IMAGE_EXTENSIONS = {
    *(b"jpg", b"jpeg", b"png", b"webp", b"ppm", b"pgm", b"pbm", b"bmp", b"gif", b"tif", b"tiff", b"avif", b"jp2"),
    *(b"img", b"image"),
}
# Offsets are 32-bit numbers of blocks.
MAX_SHARD_BYTES = BLOCK_BYTES << 32
MAX_LABEL_BYTES = 32
MAX_JSON_LABEL_BYTES = 1 << 20
MAX_LABEL = (1 << 31) - 1
# Skipped members of one shard that are listed, and of the name of each. The others are counted.
MAX_SKIPPED = 1000
MAX_SHOWN_BYTES = 500


@dataclass(frozen=True)
class ShardStamp:
    """Size, modification time and inode of a shard when it was indexed."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> ShardStamp:
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class ShardIndex:
    """Images of a shard in the order of the archive.

    `blocks` are the offsets of their contents in units of 512 bytes, `key_digests` the first 64 bits of the SHA-256 of
    their keys. `skipped` are unusable members, each with the reason in parentheses. `names` are the names of the image
    members, each ended by a zero byte.
    """

    blocks: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    labels: NDArray[np.int32]
    key_digests: NDArray[np.uint64]
    skipped: tuple[str, ...]
    names: bytes


COLUMNS = {"blocks": np.uint32, "sizes": np.uint32, "labels": np.int32, "key_digests": np.uint64}


def open_shard(path: str) -> int:
    """Return a file descriptor of a shard. Raises ShardError if it is not a regular file, and OSError."""
    # Opening a named pipe would wait for a writer. Links are followed: the Hugging Face cache consists of them.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise ShardError("is not a regular file", code="not-a-file")


def build_index(fd: int, stamp: ShardStamp) -> ShardIndex:
    """Read the headers and labels of an open shard. Raises ShardError and OSError."""
    if stamp.size > MAX_SHARD_BYTES:
        raise ShardError(f"has more than {MAX_SHARD_BYTES >> 40} TiB; split it into several shards", code="too-large")
    # Without this, the kernel reads much of the images between the headers.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    builder = _IndexBuilder(TarReader(fd, stamp.size))
    try:
        index = builder.build()
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    if ShardStamp.of(fd) != stamp:
        raise ShardError("changed while it was indexed; start again when it is complete", code="data-changed")
    return index


class _IndexBuilder:
    """Groups the members of a shard to samples."""

    def __init__(self, reader: TarReader) -> None:
        self._reader = reader
        self._columns = {name: array(np.dtype(kind).char) for name, kind in COLUMNS.items()}
        self._skipped: list[str] = []
        self._num_skipped = 0
        self._names = bytearray()

    def build(self) -> ShardIndex:
        sample: dict[bytes, TarMember] = {}
        current = None
        for member in self._reader.members():
            if member.skipped:
                self._skip(member.name, member.skipped)
                continue
            key, extension = split_key(member.name)
            if key is None:
                continue
            if key != current:
                self._add(current, sample)
                sample, current = {}, key
            if extension in sample:
                raise ShardError(
                    f"contains {_shown(member.name)} twice; make the key of each sample unique", code="duplicate-key"
                )
            sample[extension] = member
        self._add(current, sample)
        if self._num_skipped > len(self._skipped):
            self._skipped.append(f"{self._num_skipped - len(self._skipped)} more members")
        columns = {name: np.array(column, COLUMNS[name]) for name, column in self._columns.items()}
        return ShardIndex(skipped=tuple(self._skipped), names=bytes(self._names), **columns)

    def _add(self, key: bytes | None, sample: dict[bytes, TarMember]) -> None:
        """Append a sample to the index. Raises ShardError if it has no valid label."""
        if key is None:
            return
        images = [member for extension, member in sample.items() if extension in IMAGE_EXTENSIONS]
        if len(images) != 1:
            self._skip(key, f"a sample with {len(images)} images" if images else "a sample without image")
            return
        (image,) = images
        if image.size > MAX_IMAGE_BYTES:
            self._skip(image.name, f"a file of more than {MAX_IMAGE_BYTES >> 20} MiB; reduce its size")
            return
        self._columns["blocks"].append(image.offset // BLOCK_BYTES)
        self._columns["sizes"].append(image.size)
        self._columns["labels"].append(self._label(image, sample))
        self._names += image.name + b"\0"
        self._columns["key_digests"].append(int.from_bytes(hashlib.sha256(key).digest()[:8], "little"))

    def _label(self, image: TarMember, sample: dict[bytes, TarMember]) -> int:
        if (member := sample.get(b"cls")) is not None:
            text = self._reader.read(member.offset, member.size) if member.size <= MAX_LABEL_BYTES else b""
            return _check_label(text.strip().decode("ascii", "replace"), member)
        if (member := sample.get(b"json")) is None:
            advice = "add a .cls file with its class index, or a .json file with label, directly before or behind it"
            raise ShardError(f"contains {_shown(image.name)} without a label; {advice}", code="bad-label")
        if member.size > MAX_JSON_LABEL_BYTES:
            raise ShardError(f"contains {_shown(member.name)}, which is too large for a label", code="bad-label")
        # Not the codec: Python's json writes NaN and lone surrogates, which the metadata of crawled datasets contain.
        try:
            values = json.loads(self._reader.read(member.offset, member.size))
        except (ValueError, RecursionError) as error:
            raise ShardError(f"contains {_shown(member.name)}, which is not JSON", code="bad-label") from error
        label = values.get("label") if isinstance(values, dict) else None
        return _check_label(str(label) if type(label) is int else "", member)

    def _skip(self, name: bytes, reason: str) -> None:
        self._num_skipped += 1
        if len(self._skipped) < MAX_SKIPPED:
            self._skipped.append(f"{_shown(name[:MAX_SHOWN_BYTES])} ({reason})")


def split_key(name: bytes) -> tuple[bytes | None, bytes]:
    """Return the key and the extension in lower case of a member, as WebDataset does; no key if it is no sample."""
    begin = name.rfind(b"/") + 1
    dot = name.find(b".", begin)
    # Such as __index__.json, which describes the shard.
    if dot <= begin or (name.startswith(b"__", begin) and name.endswith(b"__", begin, dot)):
        return None, b""
    return name[:dot], name[dot + 1 :].lower()


def _check_label(text: str, member: TarMember) -> int:
    # At most 10 digits: int() refuses more than 4,300.
    if text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_LABEL:
        return int(text)
    what = "label, the class index" if member.name.endswith(b"json") else "the class index"
    raise ShardError(
        f"contains {_shown(member.name)}, which does not have {what} as an integer from 0 on", code="bad-label"
    )


def _shown(name: bytes) -> str:
    return printable(os.fsdecode(name))
