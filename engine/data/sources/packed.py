"""Images of a packed set, `data.dataset: packed`. `engine.data.pack.pack_file` documents the file.

Names, order and split of the images are those of the folder that was packed: with the same seed, training on a folder
and on the packed set of its files as they are gives the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from engine.config.data_sections import DataConfig
from engine.data.fingerprint import Fingerprint, hash_integers, hash_names
from engine.data.pack.pack_file import CHUNK_ROWS, Pack, encode_name, open_pack
from engine.data.sampler import PARTS, Indices, Part, stratified_split
from engine.data.sources.base import ImageFormat, Labels
from engine.data.sources.encoded import EncodedImage, EncodedSource
from engine.data.sources.folder import ALLOW_EMPTY, encoded_format
from engine.data.sources.readahead import advise_ranges
from engine.utils.errors import UsageError
from engine.utils.text import list_names

Rows = NDArray[np.uint32]


class PackedNames(Sequence[str]):
    """The names of some rows, ascending, read from the file when they are needed: a million strings take 100 MB."""

    def __init__(self, pack: Pack, rows: Rows) -> None:
        self._pack, self._rows = pack, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return PackedNames(self._pack, self._rows[index])
        return self._pack.name(self._rows[index].item())

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self._rows), CHUNK_ROWS):
            rows = self._rows[start : start + CHUNK_ROWS]
            first = int(rows[0])
            names = list(self._pack.names(first, int(rows[-1]) + 1))
            yield from (names[row - first] for row in rows.tolist())


@dataclass(frozen=True)
class PackedSource(EncodedSource):
    """Images of a packed set, decoded on load. `rows` are those of the images of each part, ascending."""

    pack: Pack
    format: ImageFormat
    rows: dict[Part, Rows]
    # `gputrain data pack` names the files that it skips.
    skipped = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.pack.classes

    @property
    def cache_root(self) -> str:
        return self.pack.digest

    def cache_stamp(self, part: Part, index: int) -> bytes:
        return encode_name(self.image_names(part)[index])

    def image_names(self, part: Part) -> Sequence[str]:
        return PackedNames(self.pack, self.rows[part])

    def num_images(self, part: Part) -> int:
        return len(self.rows[part])

    def get_labels(self, part: Part) -> Labels:
        return self.pack.labels[self.rows[part]].astype(np.int64)

    def labels_of(self, part: Part, indices: Indices) -> Labels:
        # Without an array of all labels, which would take 8 bytes per image.
        return self.pack.labels[self.rows[part][indices]].astype(np.int64)

    def fingerprint(self, part: Part) -> Fingerprint:
        return Fingerprint(
            names=hash_names(self.image_names(part)),
            labels=hash_integers(self.get_labels(part)),
            sizes=hash_integers(self.pack.sizes[self.rows[part]]),
        )

    def read_encoded(self, part: Part, index: int) -> EncodedImage:
        row = int(self.rows[part][index])
        return EncodedImage(self.pack.read(row), lambda: f"{self.pack.path}: {self.pack.describe(row)}")

    def byte_ranges(self, part: Part, indices: Indices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return offset and size in the file of the content of each image."""
        rows = self.rows[part][indices]
        return self.pack.offsets[rows].astype(np.int64), self.pack.sizes[rows].astype(np.int64)

    def prepare(self, part: Part, indices: Indices) -> None:
        with suppress(OSError):
            advise_ranges(self.pack.fd, *self.byte_ranges(part, indices))

    def in_storage_order(self, part: Part, indices: Indices) -> Indices:
        """Return the indices in the order of their contents in the file, which is random."""
        return indices[np.argsort(self.pack.offsets[self.rows[part][indices]], kind="stable")]


def open_packed(data: DataConfig, seed: int) -> PackedSource:
    """Open a packed set, and split it if it has no validation images. Reads its index only. Raises UsageError."""
    pack = open_pack(str(data.path), "data.path")
    bounds: dict[Part, tuple[int, int]] = {"train": (0, pack.num_train), "val": (pack.num_train, pack.num_images)}
    _check_classes(pack, data)
    if pack.num_val:
        rows = {part: np.arange(*bounds[part], dtype=np.uint32) for part in PARTS}
    else:
        split = stratified_split(pack.labels, data.val_split, seed)
        rows = {part: indices.astype(np.uint32) for part, indices in zip(PARTS, split, strict=True)}
    return PackedSource(pack, encoded_format(data), rows)


def packed_class_names(data: DataConfig) -> tuple[str, ...]:
    """Return the class names of a packed set. Raises UsageError."""
    return open_pack(str(data.path), "data.path").classes


def _check_classes(pack: Pack, data: DataConfig) -> None:
    """Raise UsageError for classes without a training image, as for a folder."""
    empty = np.flatnonzero(np.bincount(pack.labels[: pack.num_train], minlength=len(pack.classes)) == 0)
    if len(empty) and not data.allow_empty:
        names = list_names([pack.classes[label] for label in empty])
        reason = f"{pack.path} has classes without a training image ({names})"
        raise UsageError.one(
            "data.path",
            reason,
            f"add images and pack again, or keep the classes with {ALLOW_EMPTY}",
            code="empty-class",
        )
