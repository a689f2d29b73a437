"""Decode all images of a run into memory, in the size and channels of the model's input.

`engine.data.pipelines.memory` makes batches from them. `engine.data.sources.decoded_cache` stores them on disk, so that
the ranks of a node and later runs share one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeGuard

import numpy as np

from engine.config.rules import key_of_original_size
from engine.config.schema import Config
from engine.data.sampler import PARTS, Indices, Part
from engine.data.sources.array import ArraySource
from engine.data.sources.base import (
    CropSpec,
    ImageFormat,
    Images,
    ImageSource,
    Labels,
    Preprocessing,
    UnreadableImageError,
)
from engine.data.sources.decoded_cache import (
    DecodedChunks,
    DecodedImages,
    DecodedMetadata,
    cache_key_of_stamps,
    load_or_decode,
)
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.image import is_decoded_at_reduced_scale
from engine.utils.errors import Problem
from engine.utils.host import available_cores
from engine.utils.threads import CancellingPool

# Images decoded or converted at a time.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class InMemoryImages:
    """Decoded images of both parts.

    `images` holds an N x C x H x W uint8 array per part; both parts may share one. `rows[part]` maps the indices of a
    part to rows of its array. `unread` maps the rows of unreadable images to the reason. `warning` is for the log.
    """

    images: Mapping[Part, Images]
    rows: Mapping[Part, Indices]
    labels: Mapping[Part, Labels]
    unread: Mapping[Part, Mapping[int, str]] = field(default_factory=dict)
    warning: Problem | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the images of both parts."""
        return sum(len(rows) * self.images[part][:1].nbytes for part, rows in self.rows.items())


def load_in_memory(source: ImageSource, config: Config, image_format: ImageFormat) -> InMemoryImages:
    """Load all images of a source in the size and channels of a format.

    Training images keep the source's size if `augment.resized_crop` or `data.size_schedule` resizes them later. Raises
    UnreadableImageError if an image file is missing, or is unreadable and `data.on_bad` is fail.
    """
    labels = {part: source.get_labels(part) for part in PARTS}
    if isinstance(source, EncodedSource):
        encoded_images = _load_encoded(source, image_format, labels)
        reasons = [reason for part in PARTS for reason in encoded_images.unread.get(part, {}).values()]
        if reasons and config.data.on_bad == "fail":
            raise UnreadableImageError(reasons[0])
        return encoded_images
    formats = {part: in_memory_format(part, config, source.format, image_format) for part in PARTS}
    rows = {part: np.arange(source.num_images(part)) for part in PARTS}
    if isinstance(source, ArraySource):
        converted = {part: _converted_part(source, part, formats[part]) for part in PARTS}
        images = {part: images for part, (images, _) in converted.items()}
        problems = [problem for _, problem in converted.values() if problem]
        return InMemoryImages(images, rows, labels, warning=problems[0] if problems else None)
    images = {part: _convert(source.load(part, rows[part])[0], formats[part], part) for part in PARTS}
    return InMemoryImages(images, rows, labels)


def in_memory_format(part: Part, config: Config, source_format: ImageFormat, image_format: ImageFormat) -> ImageFormat:
    """Return the format in which the images of a part are in memory, see `_part_preprocessing`."""
    keeps_source_size = part == "train" and key_of_original_size(config) is not None
    return replace(image_format, size=source_format.size) if keeps_source_size else image_format


def _part_preprocessing(part: Part, image_format: ImageFormat) -> Preprocessing:
    return image_format.preprocessing(training=part == "train")


def in_memory_bytes(
    counts: Sequence[int], config: Config, source_format: ImageFormat, image_format: ImageFormat
) -> int:
    """Return the size of the decoded images; `counts` are the numbers of training and validation images."""
    formats = {part: in_memory_format(part, config, source_format, image_format) for part in PARTS}
    sizes = [_part_preprocessing(part, part_format).size for part, part_format in formats.items()]
    return sum(count * image_format.channels * size**2 for count, size in zip(counts, sizes, strict=True))


def uses_shared_cache(source: ImageSource) -> TypeGuard[EncodedSource | ArraySource]:
    """Whether the ranks of a node map the same cached array; otherwise each rank holds its own copy."""
    return isinstance(source, EncodedSource) or (isinstance(source, ArraySource) and bool(source.cache_key))


def cache_keys(source: EncodedSource | ArraySource, config: Config, image_format: ImageFormat) -> list[str]:
    """Return the cache keys of the decoded images of a source. Raises OSError."""
    if isinstance(source, EncodedSource):
        return [entry.cache_key for entry in _encoded_entries(source, image_format)]
    return [
        _part_cache_key(source, part, in_memory_format(part, config, source.format, image_format)) for part in PARTS
    ]


@dataclass(frozen=True)
class _EncodedEntry:
    """Encoded images that are decoded in the same way. If it is that of both parts, `reduced` in the metadata lists
    the rows of the images that were decoded at reduced scale."""

    source: EncodedSource
    parts: tuple[Part, ...]
    training: bool

    @property
    def is_of_both_parts(self) -> bool:
        return self.parts == PARTS

    @property
    def preprocessing(self) -> Preprocessing:
        return self.source.format.preprocessing(training=self.training)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.source.format.channels, self.preprocessing.size, self.preprocessing.size)

    @cached_property
    def images(self) -> list[_ImageRef]:
        """All images sorted by name: an entry of both parts does not depend on the train/validation split."""
        return sorted(
            _ImageRef(name, part, position)
            for part in self.parts
            for position, name in enumerate(self.source.image_names(part))
        )

    @property
    def cache_key(self) -> str:
        """Raises OSError."""
        parameters = {"channels": self.source.format.channels, "preprocessing": asdict(self.preprocessing)}
        stamps = (self.source.cache_stamp(image.part, image.position) for image in self.images)
        return cache_key_of_stamps(parameters, stamps, self.source.cache_root)

    def load(self, image: _ImageRef) -> Images | str:
        """Return an image, C x H x W uint8, or the reason why it is unreadable."""
        preprocessing = self.preprocessing
        crop = CropSpec(preprocessing.size, None, preprocessing.interpolation) if self.training else None
        try:
            return self.source.load(image.part, np.array([image.position]), crop)[0].reshape(self.shape)
        except UnreadableImageError as error:
            return str(error)

    def decode(self) -> DecodedChunks:
        unread: dict[int, str] = {}
        reduced: list[int] = []
        return DecodedChunks(
            (len(self.images), *self.shape),
            self._decode_chunks(unread, reduced),
            lambda: DecodedMetadata(unread=unread, reduced=tuple(reduced)),
        )

    def _decode_chunks(self, unread: dict[int, str], reduced: list[int]) -> Iterator[Images]:
        """Yield the images of the entry, and add what is known about them to `unread` and `reduced`."""
        chunk_size = max(CHUNK_BYTES // int(np.prod(self.shape)), 1)
        black = np.zeros(self.shape, np.uint8)
        with CancellingPool(available_cores()) as pool:
            for first in range(0, len(self.images), chunk_size):
                chunk = self.images[first : first + chunk_size]
                loaded = list(enumerate(pool.map(self.load, chunk), first))
                unread |= {row: image for row, image in loaded if isinstance(image, str)}
                if self.is_of_both_parts:
                    found = enumerate(pool.map(self._is_reduced, chunk), first)
                    reduced += [row for row, is_reduced in found if is_reduced]
                yield np.stack([black if isinstance(image, str) else image for _, image in loaded])

    def _is_reduced(self, image: _ImageRef) -> bool:
        try:
            data = self.source.read_encoded(image.part, image.position).data
        except UnreadableImageError:
            return False
        return is_decoded_at_reduced_scale(data, self.preprocessing)

    def is_valid(self, metadata: DecodedMetadata) -> bool:
        # An image that was unreadable when the cache was written, for example by an I/O error, may be readable now.
        return all(row < len(self.images) and isinstance(self.load(self.images[row]), str) for row in metadata.unread)


class _ImageRef(NamedTuple):
    name: str
    part: Part
    position: int


def _encoded_entries(source: EncodedSource, image_format: ImageFormat) -> list[_EncodedEntry]:
    """Return the entries of the images of a source: one of both parts if only the scale of decoding can differ."""
    if replace(image_format.preprocessing(training=True), draft=False) == image_format.preprocessing(training=False):
        return [_EncodedEntry(source, PARTS, training=True)]
    return [_EncodedEntry(source, (part,), training=part == "train") for part in PARTS]


def _load_encoded(source: EncodedSource, image_format: ImageFormat, labels: Mapping[Part, Labels]) -> InMemoryImages:
    loaded: dict[Part, _LoadedEntry] = {}
    for entry in _encoded_entries(source, image_format):
        decoded = _LoadedEntry.load(entry)
        loaded |= dict.fromkeys(entry.parts, decoded)
    shared = loaded["val"]
    if shared.entry.is_of_both_parts and set(shared.rows("val").tolist()) & set(shared.decoded.metadata.reduced):
        loaded["val"] = _LoadedEntry.load(_EncodedEntry(source, ("val",), training=False))
    warnings = [part.decoded.warning for part in loaded.values() if part.decoded.warning]
    return InMemoryImages(
        {part: loaded[part].decoded.images for part in PARTS},
        {part: loaded[part].rows(part) for part in PARTS},
        labels,
        {part: loaded[part].decoded.metadata.unread for part in PARTS},
        warnings[0] if warnings else None,
    )


@dataclass(frozen=True)
class _LoadedEntry:
    entry: _EncodedEntry
    decoded: DecodedImages

    @classmethod
    def load(cls, entry: _EncodedEntry) -> _LoadedEntry:
        """Raises UnreadableImageError if an image file is missing."""
        try:
            key = entry.cache_key
        except OSError as error:
            raise UnreadableImageError(f"the image {error.filename} cannot be read: {error.strerror}") from error
        return cls(entry, load_or_decode(key, entry.decode, entry.is_valid))

    def rows(self, part: Part) -> Indices:
        """Return the row of each image of a part."""
        rows = np.empty(self.entry.source.num_images(part), np.int64)
        for row, image in enumerate(self.entry.images):
            if image.part == part:
                rows[image.position] = row
        return rows


def _part_cache_key(source: ArraySource, part: Part, target_format: ImageFormat) -> str:
    if _has_format(source, part, target_format):
        return source.cache_key
    preprocessing = _part_preprocessing(part, target_format)
    key = f"{source.cache_key}-{part}-{target_format.channels}x{preprocessing.size}"
    if preprocessing.resize is not None:
        key += f"-resize{preprocessing.resize}"
    return key if preprocessing.interpolation == "bilinear" else f"{key}-{preprocessing.interpolation}"


def _has_format(source: ArraySource, part: Part, target_format: ImageFormat) -> bool:
    return source.format.channels == target_format.channels and _part_preprocessing(part, target_format).keeps(
        source.format.size
    )


def _converted_part(source: ArraySource, part: Part, target_format: ImageFormat) -> tuple[Images, Problem | None]:
    """Return the images of a part in the target format, cached if the source has a cache key, and a warning or None."""
    images, size = source.images[part], _part_preprocessing(part, target_format).size
    if _has_format(source, part, target_format):
        return images, None
    if not source.cache_key:
        return _convert(images, target_format, part), None
    shape = (len(images), target_format.channels, size, size)

    def decode() -> DecodedChunks:
        chunk_size = max(CHUNK_BYTES // (4 * int(np.prod(shape[1:]))), 1)
        return DecodedChunks(
            shape,
            (
                _convert(images[first : first + chunk_size], target_format, part)
                for first in range(0, len(images), chunk_size)
            ),
        )

    decoded = load_or_decode(_part_cache_key(source, part, target_format), decode)
    return decoded.images, decoded.warning


def _convert(images: Images, target_format: ImageFormat, part: Part) -> Images:
    import torch

    from engine.data.augment.batch_ops import convert_to_format

    if images.shape[1] == target_format.channels and _part_preprocessing(part, target_format).keeps(images.shape[-1]):
        return images
    converted = convert_to_format(torch.from_numpy(np.array(images)), target_format, training=part == "train")
    return converted.contiguous().numpy()
