"""Decode all images of a run into memory, in the size and channels of the model's input.

`engine.data.pipelines.memory` makes batches from them. `engine.data.sources.decoded_cache` stores them on disk, so that
the ranks of a node and later runs share one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeGuard

import numpy as np

from engine.config.rules import key_of_original_size
from engine.config.schema import Config
from engine.data.sampler import PARTS, Part
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
from engine.utils.errors import Problem
from engine.utils.host import available_cores
from engine.utils.threads import CancellingPool

# Images decoded or converted at a time.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class InMemoryImages:
    """Decoded images of both parts.

    `images` holds an N x C x H x W uint8 array per part. `unread` maps the indices of unreadable images to the reason.
    `warning` is for the log.
    """

    images: Mapping[Part, Images]
    labels: Mapping[Part, Labels]
    unread: Mapping[Part, Mapping[int, str]] = field(default_factory=dict)
    warning: Problem | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the images of both parts."""
        return sum(images.nbytes for images in self.images.values())


def load_in_memory(source: ImageSource, config: Config, image_format: ImageFormat) -> InMemoryImages:
    """Load all images of a source in the size and channels of a format.

    Training images keep the source's size if `augment.resized_crop` or `data.size_schedule` resizes them later. Raises
    UnreadableImageError if an image file is missing, or is unreadable and `data.on_bad` is fail.
    """
    labels = {part: source.get_labels(part) for part in PARTS}
    if isinstance(source, EncodedSource):
        encoded_images = _load_encoded(source, labels)
        reasons = [reason for part in PARTS for reason in encoded_images.unread.get(part, {}).values()]
        if reasons and config.data.on_bad == "fail":
            raise UnreadableImageError(reasons[0])
        return encoded_images
    formats = {part: in_memory_format(part, config, source.format, image_format) for part in PARTS}
    if isinstance(source, ArraySource):
        converted = {part: _converted_part(source, part, formats[part]) for part in PARTS}
        images = {part: images for part, (images, _) in converted.items()}
        problems = [problem for _, problem in converted.values() if problem]
        return InMemoryImages(images, labels, warning=problems[0] if problems else None)
    images = {
        part: _convert(source.load(part, np.arange(source.num_images(part)))[0], formats[part], part) for part in PARTS
    }
    return InMemoryImages(images, labels)


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
        return [_EncodedPart(source, part).cache_key for part in PARTS]
    return [
        _part_cache_key(source, part, in_memory_format(part, config, source.format, image_format)) for part in PARTS
    ]


@dataclass(frozen=True)
class _EncodedPart:
    """The images of a part of an encoded source, decoded in one way."""

    source: EncodedSource
    part: Part

    @property
    def preprocessing(self) -> Preprocessing:
        return _part_preprocessing(self.part, self.source.format)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.source.format.channels, self.preprocessing.size, self.preprocessing.size)

    @property
    def cache_key(self) -> str:
        """Raises OSError."""
        parameters = {"channels": self.source.format.channels, "preprocessing": asdict(self.preprocessing)}
        stamps = (self.source.cache_stamp(self.part, index) for index in range(self.source.num_images(self.part)))
        return cache_key_of_stamps(parameters, stamps, self.source.cache_root)

    def load(self) -> DecodedImages:
        """Return the decoded images. Raises UnreadableImageError if an image file is missing."""
        try:
            key = self.cache_key
        except OSError as error:
            raise UnreadableImageError(f"the image {error.filename} cannot be read: {error.strerror}") from error
        return load_or_decode(key, self._decode, self._is_valid)

    def _load_image(self, index: int) -> Images | str:
        """Return an image, C x H x W uint8, or the reason why it is unreadable."""
        preprocessing = self.preprocessing
        crop = CropSpec(preprocessing.size, None, preprocessing.interpolation) if self.part == "train" else None
        try:
            return self.source.load(self.part, np.array([index]), crop)[0].reshape(self.shape)
        except UnreadableImageError as error:
            return str(error)

    def _decode(self) -> DecodedChunks:
        unread: dict[int, str] = {}
        shape = self.source.num_images(self.part), *self.shape
        return DecodedChunks(shape, self._decode_chunks(unread), lambda: DecodedMetadata(unread=unread))

    def _decode_chunks(self, unread: dict[int, str]) -> Iterator[Images]:
        """Yield the images, with black ones for those that are added to `unread`."""
        chunk_size = max(CHUNK_BYTES // int(np.prod(self.shape)), 1)
        black, count = np.zeros(self.shape, np.uint8), self.source.num_images(self.part)
        with CancellingPool(available_cores()) as pool:
            for first in range(0, count, chunk_size):
                chunk = range(first, min(first + chunk_size, count))
                loaded = list(zip(chunk, pool.map(self._load_image, chunk), strict=True))
                unread |= {index: image for index, image in loaded if isinstance(image, str)}
                yield np.stack([black if isinstance(image, str) else image for _, image in loaded])

    def _is_valid(self, metadata: DecodedMetadata) -> bool:
        # An image that was unreadable when the cache was written, for example by an I/O error, may be readable now.
        count = self.source.num_images(self.part)
        return all(index < count and isinstance(self._load_image(index), str) for index in metadata.unread)


def _load_encoded(source: EncodedSource, labels: Mapping[Part, Labels]) -> InMemoryImages:
    loaded = {part: _EncodedPart(source, part).load() for part in PARTS}
    warnings = [decoded.warning for decoded in loaded.values() if decoded.warning]
    return InMemoryImages(
        {part: decoded.images for part, decoded in loaded.items()},
        labels,
        {part: decoded.metadata.unread for part, decoded in loaded.items()},
        warnings[0] if warnings else None,
    )


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
