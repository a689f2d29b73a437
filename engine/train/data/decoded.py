"""Decode all images of a run into memory, in the size and channels of the model's input.

`engine.train.data.memory` makes batches from them. `engine.train.data.sources.decoded_cache` stores them on disk, so
that the ranks of a node and later runs share one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from engine.base.errors import Problem
from engine.base.host import available_cores
from engine.base.threads import CancellingPool
from engine.config.rules import key_of_original_size
from engine.config.schema import Config
from engine.train.data.sampler import PARTS, Part
from engine.train.data.sources.base import (
    ArraySource,
    EncodedSource,
    ImageFormat,
    Images,
    ImageSource,
    Labels,
    UnreadableImageError,
)
from engine.train.data.sources.decoded_cache import (
    DecodedChunks,
    DecodedImages,
    DecodedMetadata,
    compute_cache_key,
    load_or_decode,
)
from engine.train.data.sources.formats import Preprocessing

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


def load_in_memory(source: ImageSource, config: Config, image_format: ImageFormat) -> InMemoryImages:
    """Load all images of a source in the size and channels of a format.

    Training images keep the source's size if `augment.resized_crop` or `data.size_schedule` resizes them later. Raises
    UnreadableImageError if an image is unreadable and `data.on_bad` is fail.
    """
    loaded = {each.part: each.load() for each in memory_parts(source, config, image_format)}
    unread = {part: decoded.metadata.unread for part, decoded in loaded.items()}
    reasons = [reason for reasons in unread.values() for reason in reasons.values()]
    if reasons and config.data.on_bad == "fail":
        raise UnreadableImageError(reasons[0])
    images = {part: decoded.images for part, decoded in loaded.items()}
    warnings = [decoded.warning for decoded in loaded.values() if decoded.warning]
    labels = {part: source.get_labels(part) for part in PARTS}
    return InMemoryImages(images, labels, unread, warnings[0] if warnings else None)


def memory_parts(source: ImageSource, config: Config, image_format: ImageFormat) -> list[MemoryPart]:
    """Return the parts of a source, to be loaded in the size and channels of a format."""
    keeps_source_size = key_of_original_size(config) is not None
    train_format = replace(image_format, size=source.format.size) if keeps_source_size else image_format
    return [MemoryPart(source, "train", train_format), MemoryPart(source, "val", image_format)]


@dataclass(frozen=True)
class MemoryPart:
    """The images of one part of a source, and the format in which they are in memory."""

    source: ImageSource
    part: Part
    target: ImageFormat

    @property
    def preprocessing(self) -> Preprocessing:
        """How images of the source become those in memory."""
        return self.target.preprocessing(training=self.part == "train")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """N x C x H x W in memory."""
        size = self.preprocessing.size
        return self.source.num_images(self.part), self.target.channels, size, size

    @property
    def cache_key(self) -> str:
        """Key of the decoded images; "" if they are not cached."""
        key = self.source.cache_key(self.part)
        if not key or (isinstance(self.source, ArraySource) and self._is_stored):
            return key
        geometry = {name: value for name, value in vars(self.preprocessing).items() if name != "random_box"}
        parameters = {"channels": self.target.channels, "preprocessing": geometry}
        return compute_cache_key(parameters, [self.part.encode()], key)

    @property
    def _is_stored(self) -> bool:
        """Whether the images of the source have the format already."""
        stored, preprocessing = self.source.format, self.preprocessing
        has_size = stored.size == preprocessing.resized_size == preprocessing.size
        return has_size and stored.channels == self.target.channels

    def load(self) -> DecodedImages:
        """Return the decoded images."""
        if isinstance(self.source, ArraySource) and self._is_stored:
            return DecodedImages(self.source.images[self.part], DecodedMetadata())
        if not (key := self.cache_key):
            return DecodedImages(self._load_rows(range(self.shape[0])), DecodedMetadata())
        return load_or_decode(key, self._decode, self._is_valid)

    def _decode(self) -> DecodedChunks:
        unread: dict[int, str] = {}
        return DecodedChunks(self.shape, self._decode_chunks(unread), lambda: DecodedMetadata(unread=unread))

    def _decode_chunks(self, unread: dict[int, str]) -> Iterator[Images]:
        """Yield the images, with black ones for those that are added to `unread`."""
        # Arrays are resized as floating-point numbers.
        values = prod(self.shape[1:]) * (1 if isinstance(self.source, EncodedSource) else 4)
        chunk_size = max(CHUNK_BYTES // values, 1)
        rows = range(self.shape[0])
        chunks = [rows[first : first + chunk_size] for first in range(0, len(rows), chunk_size)]
        if not isinstance(self.source, EncodedSource):
            yield from map(self._load_rows, chunks)
            return
        black = np.zeros(self.shape[1:], np.uint8)
        with CancellingPool(available_cores()) as pool:
            for chunk in chunks:
                loaded = list(zip(chunk, pool.map(self._load_file, chunk), strict=True))
                unread |= {index: image for index, image in loaded if isinstance(image, str)}
                yield np.stack([black if isinstance(image, str) else image for _, image in loaded])

    def _load_file(self, index: int) -> Images | str:
        """Return an image of a file, C x H x W uint8, or the reason why it is unreadable."""
        try:
            return self.source.load(self.part, np.array([index]), self.preprocessing)[0].reshape(self.shape[1:])
        except UnreadableImageError as error:
            return str(error)

    def _load_rows(self, rows: range) -> Images:
        """Return images that the source has in memory or generates, converted to the format."""
        images = self.source.load(self.part, np.array(rows))[0]
        if self._is_stored:
            return images
        import torch

        from engine.train.data.augment.batch_ops import convert_to_format

        return (
            convert_to_format(torch.from_numpy(images), self.target, training=self.part == "train").contiguous().numpy()
        )

    def _is_valid(self, metadata: DecodedMetadata) -> bool:
        # An image that was unreadable when the cache was written, for example by an I/O error, may be readable now.
        return all(index < self.shape[0] and isinstance(self._load_file(index), str) for index in metadata.unread)
