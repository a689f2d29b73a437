"""The packed set, one file with the images of a folder: its format, and how it is opened and read.

`engine.data.pack.writer` writes it, `engine.data.sources.packed` trains from it, `engine.data.pack.verify` checks it.

All integers are little-endian and unsigned. There is no padding.

    offset  bytes  header
         0      8  magic: 89 47 50 4B 0D 0A 1A 0A, which no text file has and which a transfer as text would change
         8      4  version of the format: 1
        12      4  size of the info section
        16      8  size of the file
        24      8  offset of the index, which is where the images end
        32      8  number of training images
        40      8  number of validation images; 0 if the images are split when the file is opened
        48      8  size of the names section
        56      8  zero
        64     32  SHA-256 of bytes 0 to 63 of the header and of the whole index
        96         the contents of the image files, one behind the other
    index          tables of one element per image (row), of the training images first, then of the validation images
                   offset in the file, 8 bytes
                   end of the name in the names section, 8 bytes
                   size, 4 bytes
                   CRC-32 of the content (zlib), 4 bytes
                   class index, 4 bytes
    names          the paths of the images relative to the packed folder, UTF-8 with surrogateescape, not separated
    info           JSON object, see `PackInfo`

Rows are in the order of `engine.data.sources.folder`. The contents are in the order of a hash of their names
(`storage_order`): a contiguous range of the file is a random sample of all classes. They leave no gap.

The index is read and verified when the file is opened, without reading an image. Its tables stay in memory, 18 bytes
per image, and images are read with pread(2). Neither is mapped: if a mapped file is truncated, or its network file
system fails, the kernel kills the process with SIGBUS, where a read raises an error that names the image. The copy that
a read makes takes 1% of the time to decode the image. Names stay in the file until they are needed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import struct
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from engine.data.pack.reencode import Encoding
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.image_file import MAX_IMAGE_BYTES
from engine.utils.codec import InvalidRecordError, Record, decode, encode, format_problem
from engine.utils.errors import CodedError, UsageError
from engine.utils.files import open_regular_file

MAGIC = b"\x89GPK\r\n\x1a\n"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQQQ32s")
HEADER_BYTES = _HEADER.size
_DIGEST_BYTES = 32
ROW_BYTES = 28
# Bounds of what is read into memory: 200 times ImageNet's number of images, and the class names as JSON.
MAX_IMAGES = 1 << 28
MAX_INFO_BYTES = 1 << 24
# PATH_MAX of Linux.
MAX_NAME_BYTES = 4096
# Rows whose names are read, and bytes that are hashed, at a time.
CHUNK_ROWS = 1 << 14
CHUNK_BYTES = 1 << 22
UNKNOWN_NAME = "?"
PACK_AGAIN = "pack it again"
SET_TO_PACK = "set it to a file that gputrain data pack wrote"
# By the code of the error. For others: pack it again.
_ADVICE = {"wrong-format": SET_TO_PACK, "unfinished": "run the command that packs it again, which continues"}

UInt32s = NDArray[np.uint32]
UInt64s = NDArray[np.uint64]


class InvalidPackError(CodedError):
    """A file is no packed set, or is damaged. The message is a clause that follows the path."""

    @property
    def advice(self) -> str:
        """What to do about it."""
        return _ADVICE.get(self.code, PACK_AGAIN)


class PackInfo(Record, frozen=True, kw_only=True):
    """The info section of a packed set: the class names, and how the images were re-encoded, None if they were not."""

    classes: tuple[str, ...]
    encoding: Encoding | None


def encode_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def storage_order(names: Sequence[str]) -> list[int]:
    """Return the rows of a part in the order in which their contents are stored, a function of their names."""
    keys = [(blake2b(encoded := encode_name(name), digest_size=8).digest(), encoded) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def write_index(
    fd: int,
    *,
    num_train: int,
    num_val: int,
    offsets: UInt64s,
    sizes: UInt32s,
    checksums: UInt32s,
    labels: UInt32s,
    names: Sequence[str],
    info: PackInfo,
) -> int:
    """Write everything about the images but their contents, in the order of rows: the index behind the images, then the
    header. Return the size of the file. Raises OSError."""
    encoded = [encode_name(name) for name in names]
    name_ends = np.cumsum([len(name) for name in encoded], dtype="<u8")
    tables = (offsets.astype("<u8"), name_ends, *(table.astype("<u4") for table in (sizes, checksums, labels)))
    info_section = encode(info)
    index = b"".join([*(table.tobytes() for table in tables), *encoded, info_section])
    end = HEADER_BYTES + int(sizes.sum(dtype=np.uint64))
    values = (len(info_section), end + len(index), end, num_train, num_val, int(name_ends[-1]), 0)
    header = _HEADER.pack(MAGIC, VERSION, *values, bytes(_DIGEST_BYTES))[:-_DIGEST_BYTES]
    write_fully(fd, index, end)
    write_fully(fd, header + hashlib.sha256(header + index).digest(), 0)
    return end + len(index)


def write_fully(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file. Raises OSError."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


class Pack:
    """An open packed set. Threads and forked processes may share one; pickled, it is opened again.

    `offsets`, `sizes`, `checksums` and `labels` have one element per row. `digest` is the SHA-256 in the header, and
    `fd` the descriptor of the file.
    """

    def __init__(self, path: str, digest: str | None = None) -> None:
        """Open and verify a packed set, with `digest` only one whose index has it. Raises InvalidPackError, OSError."""
        self.path = path
        self.index_offset = self.num_train = self.num_val = 0
        # The user's own choice, so it may be a link.
        with open_regular_file(os.path.realpath(path)) as file:
            self.fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.fd)
        self._read_header()
        if digest is not None and digest != self.digest:
            raise InvalidPackError("was replaced by another packed set", code="data-changed")
        self._read_index()

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.path, self.digest)

    @property
    def num_images(self) -> int:
        return self.num_train + self.num_val

    def _read_header(self) -> None:
        header = os.pread(self.fd, HEADER_BYTES, 0)
        file_bytes = os.fstat(self.fd).st_size
        if header == bytes(len(header)):
            raise InvalidPackError("is not finished", code="unfinished")
        if not (header + MAGIC[len(header) :]).startswith(MAGIC):
            raise InvalidPackError("is not a packed set of gputrain", code="wrong-format")
        if len(header) < HEADER_BYTES:
            raise InvalidPackError("is truncated", code="damaged")
        fields = _HEADER.unpack(header)
        version, info_bytes, size, self.index_offset, self.num_train, self.num_val, names_bytes, _, digest = fields[1:]
        if (problem := format_problem(version, VERSION)) is not None:
            raise InvalidPackError(problem, code="wrong-version")
        if file_bytes < size:
            raise InvalidPackError(f"is truncated: {file_bytes:,} of {size:,} bytes", code="damaged")
        self._header = header[:-_DIGEST_BYTES]
        self.digest: str = digest.hex()
        self._names_offset: int = self.index_offset + ROW_BYTES * self.num_images
        self._info_offset: int = self._names_offset + names_bytes
        is_bounded = (
            0 < self.num_train <= self.num_images <= MAX_IMAGES
            and info_bytes <= MAX_INFO_BYTES
            and names_bytes <= MAX_NAME_BYTES * self.num_images
            and self._info_offset + info_bytes == size == file_bytes
            and self.index_offset >= HEADER_BYTES
        )
        if not is_bounded:
            raise InvalidPackError("is damaged: its header is wrong", code="damaged")

    def _read_index(self) -> None:
        digest, offset = hashlib.sha256(self._header), self.index_offset
        tables: list[NDArray[Any]] = []
        for dtype in ("<u8", "<u8", "<u4", "<u4", "<u4"):
            table = np.empty(self.num_images, dtype)
            self._read_into(table.data.cast("B"), offset)
            digest.update(table.data)
            tables.append(table)
            offset += table.nbytes
        self.offsets, name_ends, self.sizes, self.checksums, labels = tables
        for start in range(offset, self._info_offset, CHUNK_BYTES):
            digest.update(self._read_at(start, min(CHUNK_BYTES, self._info_offset - start)))
        file_bytes = self._info_offset + struct.unpack_from("<I", self._header, 12)[0]
        info = self._read_at(self._info_offset, file_bytes - self._info_offset)
        digest.update(info)
        if digest.hexdigest() != self.digest:
            raise InvalidPackError("is damaged: the checksum of its index is wrong", code="damaged")
        try:
            self.classes = decode(info, PackInfo).classes
        except InvalidRecordError as error:
            raise InvalidPackError(str(error), code=error.code) from error
        self._check_tables(name_ends, labels)
        # ImageNet has 1,000 classes.
        self.labels: NDArray[np.integer] = labels.astype(np.uint16 if len(self.classes) <= 1 << 16 else np.uint32)

    def _check_tables(self, name_ends: UInt64s, labels: UInt32s) -> None:
        """Raise InvalidPackError if a table leads out of the file. The file may be made to mislead."""
        if len(set(self.classes)) < len(self.classes) or len(self.classes) < 2:
            raise InvalidPackError("is damaged: its classes are wrong", code="damaged")
        if int(labels.max()) >= len(self.classes):
            raise InvalidPackError("is damaged: it has images of an unknown class", code="damaged")
        lengths = np.diff(name_ends.astype(np.int64), prepend=0)
        if int(lengths.min()) < 1 or int(lengths.max()) > MAX_NAME_BYTES or name_ends[-1] != self._names_bytes:
            raise InvalidPackError("is damaged: its names are wrong", code="damaged")
        if (
            int(self.offsets.max()) > self.index_offset
            or not 0 < self.sizes.min() <= self.sizes.max() <= MAX_IMAGE_BYTES
            or int(self.offsets.min()) < HEADER_BYTES
            or int((self.offsets + self.sizes).max()) > self.index_offset
        ):
            raise InvalidPackError("is damaged: it has images outside of the file", code="damaged")

    @property
    def _names_bytes(self) -> int:
        return self._info_offset - self._names_offset

    def read(self, row: int) -> bytes:
        """Return the content of an image file. Raises UnreadableImageError, also if its checksum is wrong."""
        size = int(self.sizes[row])
        try:
            data = self._read_at(int(self.offsets[row]), size)
        except InvalidPackError as error:
            raise UnreadableImageError(f"{self.path} {error}: {self.describe(row)} is missing; {PACK_AGAIN}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableImageError(f"{self.path}: {self.describe(row)} cannot be read: {reason}") from error
        if zlib.crc32(data) != self.checksums[row]:
            raise UnreadableImageError(
                f"{self.path}: {self.describe(row)} is damaged: its checksum is wrong; {PACK_AGAIN}"
            )
        return data

    def describe(self, row: int) -> str:
        """Return the name and the row of an image for messages, only the row if the name cannot be read."""
        name = self.name(row)
        return f"image {row}" if name == UNKNOWN_NAME else f"{name} (image {row})"

    def name(self, row: int) -> str:
        """Return the name of an image, or a question mark if it cannot be read."""
        try:
            return next(self.names(row, row + 1))
        except (OSError, InvalidPackError, StopIteration):
            return UNKNOWN_NAME

    def names(self, first: int, end: int) -> Iterator[str]:
        """Yield the names of a range of rows. Raises OSError, InvalidPackError."""
        ends_offset = self.index_offset + 8 * self.num_images
        for start in range(first, end, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, end)
            before = 1 if start else 0
            ends = np.frombuffer(self._read_at(ends_offset + 8 * (start - before), 8 * (stop - start + before)), "<u8")
            bounds = (ends if before else np.insert(ends, 0, 0)).tolist()
            # Verified when the file was opened, but its owner may have changed it.
            if not 0 <= bounds[-1] - bounds[0] <= MAX_NAME_BYTES * CHUNK_ROWS or bounds[-1] > self._names_bytes:
                raise InvalidPackError("has changed", code="data-changed")
            text = self._read_at(self._names_offset + bounds[0], bounds[-1] - bounds[0])
            for low, high in pairwise(bounds):
                yield text[low - bounds[0] : high - bounds[0]].decode("utf-8", "surrogateescape")

    def _read_at(self, offset: int, size: int) -> bytes:
        data = os.pread(self.fd, size, offset)
        if len(data) == size:
            return data
        # Linux reads at most 2 GiB at once, and a network file system may return less.
        buffer = bytearray(size)
        self._read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def _read_into(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.preadv(self.fd, [view], offset)
            if count == 0:
                raise InvalidPackError("is truncated", code="damaged")
            view, offset = view[count:], offset + count


def open_pack(path: str, location: str) -> Pack:
    """Open a packed set. `location` is the key or flag that names it. Raises UsageError."""
    with reported_pack_errors(path, location):
        return Pack(path)


@contextmanager
def reported_pack_errors(path: str, location: str) -> Iterator[None]:
    """Raise errors of a packed set as a UsageError."""
    try:
        yield
    except InvalidPackError as error:
        raise UsageError.one(location, f"{path} {error}", error.advice, code=error.code) from error
    except OSError as error:
        if Path(path).is_dir():
            advice = f"set it to the file that `gputrain data pack {shlex.quote(path)} -o FILE` writes"
            raise UsageError.one(location, f"{path} is a folder", advice, code="not-a-file") from error
        reason = f"{path} cannot be read: {error.strerror or error}"
        raise UsageError.one(location, reason, SET_TO_PACK, code="not-readable") from error
