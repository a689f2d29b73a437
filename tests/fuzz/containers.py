"""Tar shards with the images of a dataset, and the function that reads them for `readers.py`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from engine.train.data.sources.tar_index import load_index


def dataset_file(root: Path) -> Path:
    return root / "dataset"


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
    for start in range(0, len(shard) - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE):
        if shard[start + 257 : start + 262] == b"ustar":
            shard[start + 148 : start + 156] = b" " * 8
            shard[start + 148 : start + 156] = b"%06o\0 " % sum(shard[start : start + tarfile.BLOCKSIZE])
    return bytes(shard)


def read_shard(root: Path) -> None:
    """An accepted shard has a name for each image, and contents within the file."""
    path = dataset_file(root)
    index = load_index([str(path)])
    assert len(index.image_names()) == len(index.labels) == len(index.offsets)
    assert (index.offsets + index.sizes <= path.stat().st_size).all()
