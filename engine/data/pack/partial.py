"""The unfinished packed set: the contents written so far, and a journal by which an interrupted command continues.

For `photos.gpk` it is `photos.gpk.partial` with `photos.gpk.partial.journal`. The journal has a line of 64 hexadecimal
digits, the SHA-256 of the options, then a record of 20 bytes per image:

    offset  bytes
         0      8  digest of the name, the size and the time of modification of the image file
         8      4  size of the content
        12      4  CRC-32 of the content
        16      4  CRC-32 of the 16 bytes before

The contents reach the disk (fsync) before their records do. What is behind the contents of the last intact record is a
torn tail, which is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from engine.data.pack.pack_file import HEADER_BYTES, write_fully
from engine.utils.errors import Problem, UsageError
from engine.utils.files import fsync_folder
from engine.utils.text import pluralize

_RECORD = struct.Struct("<8sIII")
_CHECKED_BYTES = 16
_OPTIONS_BYTES = 65
# An interruption costs at most the images of this many bytes or seconds.
SYNC_BYTES = 64 << 20
SYNC_SECONDS = 5.0
# Disk space that `keep` frees beyond that of the records: file systems count in blocks.
SPARE_BYTES = 1 << 16


class Record(NamedTuple):
    """One image of an unfinished packed set. `stamp` changes with its file."""

    stamp: bytes
    size: int
    checksum: int


class PartialPack:
    """The unfinished packed set of one output file, locked for this process.

    `records` are those of the images written so far. `restart` says why earlier ones are not kept.
    """

    def __init__(self, output: Path, options: Mapping[str, Any], sync_bytes: int = SYNC_BYTES) -> None:
        """Open or create the files. Raises UsageError if another process packs the same output, and OSError."""
        self.path = output.with_name(f"{output.name}.partial")
        self._output, self._sync_bytes = output, sync_bytes
        self._journal_path = output.with_name(f"{output.name}.partial.journal")
        self._options = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest().encode() + b"\n"
        self.records: list[Record] = []
        self.restart: Problem | None = None
        self._data = _open_locked(self.path)
        self._journal = -1
        try:
            self._journal = _open(self._journal_path)
            self._read_journal()
        except BaseException:
            self.close()
            raise
        self._unsynced, self._synced_records, self._synced_at = 0, len(self.records), time.monotonic()

    def close(self) -> None:
        """Close the files without writing anything. The lock ends."""
        for fd in (self._journal, self._data):
            if fd >= 0:
                os.close(fd)
        self._journal = self._data = -1

    def _read_journal(self) -> None:
        """Read the intact records whose contents are there."""
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        if text[:_OPTIONS_BYTES] != self._options:
            if len(text) > _OPTIONS_BYTES:
                images = pluralize((len(text) - _OPTIONS_BYTES) // _RECORD.size, "image")
                reason = f"it was begun with other options or another version of Pillow, so {images} are packed again"
                self.restart = Problem(str(self.path), reason, code="pack-restarted")
            return
        data_bytes = os.fstat(self._data).st_size
        end = HEADER_BYTES
        records = memoryview(text)[_OPTIONS_BYTES:]
        records = records[: len(records) // _RECORD.size * _RECORD.size]
        for position, (stamp, size, checksum, check) in enumerate(_RECORD.iter_unpack(records)):
            start = position * _RECORD.size
            end += size
            if check != zlib.crc32(records[start : start + _CHECKED_BYTES]) or end > data_bytes:
                break
            self.records.append(Record(stamp, size, checksum))

    def begin(self, stamps: Sequence[bytes]) -> int:
        """Keep the images at the beginning that have these stamps, cut off the rest, and return how many are kept."""
        kept = 0
        for record, stamp in zip(self.records, stamps, strict=False):
            if record.stamp != stamp:
                break
            kept += 1
        if kept < len(self.records):
            changed = len(self.records) - kept
            reason = f"image files have changed, so {changed:,} of {len(self.records):,} are packed again"
            self.restart = Problem(str(self.path), reason, code="pack-restarted")
        del self.records[kept:]
        self._end = HEADER_BYTES + sum(record.size for record in self.records)
        # The journal first: a kill between the two leaves contents without records, which is a torn tail.
        os.ftruncate(self._journal, _OPTIONS_BYTES + _RECORD.size * kept)
        write_fully(self._journal, self._options, 0)
        os.fsync(self._journal)
        os.ftruncate(self._data, self._end)
        self._synced_records = kept
        return kept

    def append(self, stamp: bytes, content: bytes) -> None:
        """Write the next image. Raises OSError."""
        write_fully(self._data, content, self._end)
        self.records.append(Record(stamp, len(content), zlib.crc32(content)))
        self._end += len(content)
        self._unsynced += len(content)
        if self._unsynced >= self._sync_bytes or time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Flush the contents to the disk, then their records. Raises OSError."""
        os.fsync(self._data)
        lines = []
        for record in self.records[self._synced_records :]:
            line = _RECORD.pack(*record, 0)[:_CHECKED_BYTES]
            lines.append(line + struct.pack("<I", zlib.crc32(line)))
        write_fully(self._journal, b"".join(lines), _OPTIONS_BYTES + _RECORD.size * self._synced_records)
        os.fsync(self._journal)
        self._unsynced, self._synced_records, self._synced_at = 0, len(self.records), time.monotonic()

    def keep(self) -> None:
        """Flush what is written so far. A full disk has no room for the records: the last images are given up for them.

        Raises OSError.
        """
        with suppress(OSError):
            self.sync()
            return
        freed_bytes, needed_bytes = 0, _RECORD.size * (len(self.records) - self._synced_records) + SPARE_BYTES
        while freed_bytes < needed_bytes and len(self.records) > self._synced_records:
            freed_bytes += self.records.pop().size
        self._end -= freed_bytes
        os.ftruncate(self._data, self._end)
        self.sync()

    @property
    def fd(self) -> int:
        """The descriptor of the contents, behind which the index is written."""
        return self._data

    def finish(self) -> None:
        """Flush the complete file to the disk, and rename it to the output. Raises OSError."""
        os.fsync(self._data)
        self.path.replace(self._output)
        fsync_folder(self._output.parent)
        self._journal_path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    """Return a descriptor of a regular file, which is created if it does not exist. Raises OSError."""
    if path.is_symlink():
        raise UsageError.one(
            "--output", f"{path} is a link", "delete it, or choose another output file", code="is-link"
        )
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError.one(
            "--output", f"{path} is not a regular file", "choose another output file", code="not-a-file"
        )
    return fd


def _open_locked(path: Path) -> int:
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have renamed the file since it was opened.
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    raise UsageError.one(
        "--output",
        f"another process packs into {path}",
        "wait for it, or choose another output file",
        code="already-running",
    )
