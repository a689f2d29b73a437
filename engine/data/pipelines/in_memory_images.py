"""Decode all images of a run into memory, in the size and channels of the model's input.

`engine.data.pipelines.memory` makes batches from them. `engine.data.sources.decoded_cache` stores them on disk, so that
the ranks of a node and later runs share one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from engine.config.schema import Config
from engine.data.sampler import PARTS, Indices, Part
from engine.data.sources.array import ArraySource
from engine.data.sources.base import ImageFormat, Images, ImageSource, Labels, UnreadableImageError
from engine.data.sources.decoded_cache import DecodedChunks, compute_cache_key, load_or_decode
from engine.data.sources.folder import FolderSource
from engine.utils.host import available_cores

# Images decoded or converted at a time.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class InMemoryImages:
    """Decoded images of both parts.

    `images` holds an N x C x H x W uint8 array per part; both parts may share one. `rows[part]` maps the indices of a
    part to rows of its array. `unread` maps a row to the reason why its image is unreadable. `warning` is for the log.
    """

    images: Mapping[Part, Images]
    rows: Mapping[Part, Indices]
    labels: Mapping[Part, Labels]
    unread: Mapping[int, str] = field(default_factory=dict)
    warning: str | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the images of both parts."""
        return sum(len(rows) * self.images[part][:1].nbytes for part, rows in self.rows.items())


def load_in_memory(source: ImageSource, config: Config, image_format: ImageFormat) -> InMemoryImages:
    """Load all images of a source in the size and channels of a format.

    Training images keep the source's size if `augment.resized_crop` crops them later. Raises UnreadableImageError if an
    image file is missing, or is unreadable and `data.on_bad` is fail.
    """
    labels = {part: source.get_labels(part) for part in PARTS}
    if isinstance(source, FolderSource):
        folder_images = _load_folder(source, image_format, labels)
        if folder_images.unread and config.data.on_bad == "fail":
            raise UnreadableImageError(next(iter(folder_images.unread.values())))
        return folder_images
    formats = {part: in_memory_format(part, config, source.format, image_format) for part in PARTS}
    rows = {part: np.arange(source.num_images(part)) for part in PARTS}
    if isinstance(source, ArraySource):
        converted = {part: _converted_part(source, part, formats[part]) for part in PARTS}
        images = {part: images for part, (images, _) in converted.items()}
        problems = [problem for _, problem in converted.values() if problem]
        return InMemoryImages(images, rows, labels, warning=problems[0] if problems else None)
    images = {part: _convert(source.load(part, rows[part])[0], formats[part]) for part in PARTS}
    return InMemoryImages(images, rows, labels)


def in_memory_format(part: Part, config: Config, source_format: ImageFormat, image_format: ImageFormat) -> ImageFormat:
    """Return the format in which the images of a part are in memory."""
    keeps_source_size = part == "train" and config.augment.resized_crop
    return replace(image_format, size=source_format.size) if keeps_source_size else image_format


def in_memory_bytes(
    counts: Sequence[int], config: Config, source_format: ImageFormat, image_format: ImageFormat
) -> int:
    """Return the size of the decoded images; `counts` are the numbers of training and validation images."""
    formats = [in_memory_format(part, config, source_format, image_format) for part in PARTS]
    return sum(
        count * part_format.channels * part_format.size**2 for count, part_format in zip(counts, formats, strict=True)
    )


def uses_shared_cache(source: ImageSource) -> TypeGuard[FolderSource | ArraySource]:
    """Whether the ranks of a node map the same cached array; otherwise each rank holds its own copy."""
    return isinstance(source, FolderSource) or (isinstance(source, ArraySource) and bool(source.cache_key))


def cache_keys(source: FolderSource | ArraySource, config: Config, image_format: ImageFormat) -> list[str]:
    """Return the cache keys of the decoded images of a source. Raises OSError."""
    if isinstance(source, FolderSource):
        return [_folder_cache_key(source, image_format)]
    return [
        _part_cache_key(source, part, in_memory_format(part, config, source.format, image_format)) for part in PARTS
    ]


def _folder_cache_key(source: FolderSource, target_format: ImageFormat) -> str:
    root = Path(source.root)
    files = (root / ref.path for ref in _sorted_images(source))
    return compute_cache_key({"folder": [target_format.size, target_format.channels]}, files, root)


def _part_cache_key(source: ArraySource, part: Part, target_format: ImageFormat) -> str:
    return (
        source.cache_key
        if _has_format(source, target_format)
        else f"{source.cache_key}-{part}-{target_format.channels}x{target_format.size}"
    )


def _has_format(source: ArraySource, target_format: ImageFormat) -> bool:
    return (source.format.size, source.format.channels) == (target_format.size, target_format.channels)


class _ImageRef(NamedTuple):
    path: str
    part: Part
    position: int


def _sorted_images(source: FolderSource) -> list[_ImageRef]:
    """Return all images sorted by path, so that the cached array does not depend on the train/validation split."""
    return sorted(_ImageRef(path, part, position) for part in PARTS for position, path in enumerate(source.paths[part]))


def _load_folder(source: FolderSource, image_format: ImageFormat, labels: Mapping[Part, Labels]) -> InMemoryImages:
    refs, shape = _sorted_images(source), (image_format.channels, image_format.size, image_format.size)

    def load(ref: _ImageRef) -> Images | str:
        """Return the image, C x H x W uint8, or the reason why it is unreadable."""
        try:
            return source.load(ref.part, np.array([ref.position]))[0].reshape(shape)
        except UnreadableImageError as error:
            return str(error)

    def decode() -> DecodedChunks:
        unread: dict[str, str] = {}
        return DecodedChunks((len(refs), *shape), decode_chunks(unread), {"unread": unread})

    def decode_chunks(unread: dict[str, str]) -> Iterator[Images]:
        chunk_size = max(CHUNK_BYTES // int(np.prod(shape)), 1)
        pool = ThreadPoolExecutor(available_cores())
        try:
            for first in range(0, len(refs), chunk_size):
                loaded = list(pool.map(load, refs[first : first + chunk_size]))
                unread |= {str(first + offset): image for offset, image in enumerate(loaded) if isinstance(image, str)}
                yield np.stack([np.zeros(shape, np.uint8) if isinstance(image, str) else image for image in loaded])
        finally:
            pool.shutdown(cancel_futures=True)

    def is_valid(metadata: Mapping[str, Any]) -> bool:
        unread = metadata.get("unread")
        if not isinstance(unread, dict) or not all(isinstance(reason, str) for reason in unread.values()):
            return False
        # An image that was unreadable when the cache was written, for example by an I/O error, may be readable now.
        by_row = {str(row): ref for row, ref in enumerate(refs)} if unread else {}
        return all(row in by_row and isinstance(load(by_row[row]), str) for row in unread)

    try:
        key = _folder_cache_key(source, image_format)
    except OSError as error:
        raise UnreadableImageError(f"the image {error.filename} cannot be read: {error.strerror}") from error
    decoded = load_or_decode(key, decode, is_valid)
    rows: dict[Part, Indices] = {part: np.empty(source.num_images(part), np.int64) for part in PARTS}
    for row, ref in enumerate(refs):
        rows[ref.part][ref.position] = row
    unread = {int(row): reason for row, reason in decoded.metadata["unread"].items()}
    return InMemoryImages(dict.fromkeys(PARTS, decoded.images), rows, labels, unread, decoded.warning)


def _converted_part(source: ArraySource, part: Part, target_format: ImageFormat) -> tuple[Images, str | None]:
    """Return the images of a part in the target format, cached if the source has a cache key, and a warning or None."""
    images = source.images[part]
    if _has_format(source, target_format):
        return images, None
    if not source.cache_key:
        return _convert(images, target_format), None
    shape = (len(images), target_format.channels, target_format.size, target_format.size)

    def decode() -> DecodedChunks:
        chunk_size = max(CHUNK_BYTES // (4 * int(np.prod(shape[1:]))), 1)
        return DecodedChunks(
            shape,
            (
                _convert(images[first : first + chunk_size], target_format)
                for first in range(0, len(images), chunk_size)
            ),
        )

    decoded = load_or_decode(_part_cache_key(source, part, target_format), decode)
    return decoded.images, decoded.warning


def _convert(images: Images, target_format: ImageFormat) -> Images:
    import torch

    from engine.data.augment.batch_ops import convert_to_format

    if images.shape[1:] == (target_format.channels, target_format.size, target_format.size):
        return images
    return convert_to_format(torch.from_numpy(np.array(images)), target_format).contiguous().numpy()
