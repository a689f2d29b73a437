"""Files with the images of a dataset, packed sets and tar shards, and the functions that read them for `readers.py`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import zlib
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from engine.data.pack.pack_file import Pack, PackInfo, write_index
from engine.data.pack.reencode import Encoding
from engine.data.pack.verify import damaged_images
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.tar_headers import BLOCK_BYTES
from engine.data.sources.tar_index import ShardStamp, build_index, open_shard


def dataset_file(root: Path) -> Path:
    return root / "dataset"


def packed_set() -> bytes:
    """Return a packed set of two images of four bytes."""
    contents, names = (b"abcd", b"efgh"), ("a/1.png", "b/2.png")
    with TemporaryFile() as file:
        file.write(bytes(96) + contents[1] + contents[0])
        file.flush()
        write_index(
            file.fileno(),
            num_train=2,
            num_val=0,
            offsets=np.array([100, 96], np.uint64),
            sizes=np.full(2, 4, np.uint32),
            checksums=np.array([zlib.crc32(content) for content in contents], np.uint32),
            labels=np.array([0, 1], np.uint32),
            names=names,
            info=PackInfo(classes=("a", "b"), encoding=Encoding(max_side=40, quality=90)),
        )
        file.seek(0)
        return file.read()


def with_right_digest(content: bytes) -> bytes:
    """Return a packed set whose header says that it is intact, so that the rest is read."""
    index = int.from_bytes(content[24:32], "little")
    return content[:64] + hashlib.sha256(content[:64] + content[index:]).digest() + content[96:]


def read_pack(root: Path) -> None:
    """An accepted packed set has names and contents within the file."""
    pack = Pack(str(dataset_file(root)))
    assert len([*pack.names(0, pack.num_images)]) == pack.num_images
    for row in range(pack.num_images):
        with contextlib.suppress(UnreadableImageError):
            assert len(pack.read(row)) == pack.sizes[row]
    assert int(pack.labels.max()) < len(pack.classes)
    assert all(str(pack.path) in problem for problem in damaged_images(pack, lambda _: None))


def tar_shard() -> bytes:
    """Return a shard of two samples: a long name with a label in a text file, and a sparse file with one in JSON."""
    members = (
        ("n" * 120 + ".png", b"abcd"),
        ("n" * 120 + ".cls", b"1"),
        ("2.jpg", b"1\n0\n4\n"),
        ("2.json", b'{"label": 0}'),
    )
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == "2.jpg":
                member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "4"}
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def with_right_checksums(content: bytes) -> bytes:
    """Return a shard whose headers have the right checksums, so that the rest is read."""
    shard = bytearray(content)
    for start in range(0, len(shard) - BLOCK_BYTES, BLOCK_BYTES):
        if shard[start + 257 : start + 262] == b"ustar":
            shard[start + 148 : start + 156] = b" " * 8
            shard[start + 148 : start + 156] = b"%06o\0 " % sum(shard[start : start + BLOCK_BYTES])
    return bytes(shard)


def read_shard(root: Path) -> None:
    """An accepted shard has a label and a name for each image, and contents within the file."""
    fd = open_shard(str(dataset_file(root)))
    try:
        stamp = ShardStamp.of(fd)
        index = build_index(fd, stamp)
    finally:
        os.close(fd)
    assert index.names.count(b"\0") == len(index.labels) == len(index.blocks)
    assert all(
        block * BLOCK_BYTES + size <= stamp.size
        for block, size in zip(index.blocks.tolist(), index.sizes.tolist(), strict=True)
    )
