"""All images of a run as arrays in memory, in the form that the model knows."""

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
from engine.data.sources.base import ImageFormat, Images, Labels, Source, UnreadableImageError
from engine.data.sources.decoded_cache import Fresh, kept_or_decoded, key_of
from engine.data.sources.folder import FolderSource
from engine.utils.host import cores

# Decoded, or brought to another form, at once.
PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Held:
    """`images` N x C x H x W of each part, of which `rows` are the part's, in its order; both parts may have the same.
    `unread` says of a row why its image could not be read; `problem` is for the log."""

    images: Mapping[Part, Images]
    rows: Mapping[Part, Indices]
    labels: Mapping[Part, Labels]
    unread: Mapping[int, str] = field(default_factory=dict)
    problem: str | None = None

    @property
    def bytes(self) -> int:
        """Of the images of both parts."""
        return sum(len(rows) * self.images[part][:1].nbytes for part, rows in self.rows.items())


def hold(source: Source, config: Config, image_format: ImageFormat) -> Held:
    """The images of a source in the format's size and channels; those that augment.resized_crop is still to cut keep
    their size. Raises UnreadableImageError where data.on_bad does not let one be left out."""
    labels = {part: source.labels_of(part) for part in PARTS}
    if isinstance(source, FolderSource):
        held = _hold_folder(source, image_format, labels)
        if held.unread and config.data.on_bad == "fail":
            raise UnreadableImageError(next(iter(held.unread.values())))
        return held
    wanted = {part: held_format(part, config, source.format, image_format) for part in PARTS}
    rows = {part: np.arange(source.count(part)) for part in PARTS}
    if isinstance(source, ArraySource):
        fitted = {part: _fitted(source, part, wanted[part]) for part in PARTS}
        images = {part: images for part, (images, _) in fitted.items()}
        problems = [problem for _, problem in fitted.values() if problem]
        return Held(images, rows, labels, problem=problems[0] if problems else None)
    images = {part: _fit(source.load(part, rows[part])[0], wanted[part]) for part in PARTS}
    return Held(images, rows, labels)


def held_format(part: Part, config: Config, own: ImageFormat, image_format: ImageFormat) -> ImageFormat:
    """The form that the images of a part are held in, of a source whose own form is `own`."""
    cut_later = part == "train" and config.augment.resized_crop
    return replace(image_format, size=own.size) if cut_later else image_format


def held_bytes(counts: Sequence[int], config: Config, own: ImageFormat, image_format: ImageFormat) -> int:
    """Of so many images in each of the two parts."""
    forms = [held_format(part, config, own, image_format) for part in PARTS]
    return sum(count * form.channels * form.size**2 for count, form in zip(counts, forms, strict=True))


def is_shared(source: Source) -> TypeGuard[FolderSource | ArraySource]:
    """Whether all processes map the same pages of the cache; else each holds the images for itself."""
    return isinstance(source, FolderSource) or (isinstance(source, ArraySource) and bool(source.key))


def kept_keys(source: FolderSource | ArraySource, config: Config, image_format: ImageFormat) -> list[str]:
    """Of the decoded images in the cache. Raises OSError."""
    if isinstance(source, FolderSource):
        return [_key_of_folder(source, image_format)]
    return [_key_of_part(source, part, held_format(part, config, source.format, image_format)) for part in PARTS]


def _key_of_folder(source: FolderSource, wanted: ImageFormat) -> str:
    root = Path(source.root)
    files = (root / place.path for place in _places(source))
    return key_of({"folder": [wanted.size, wanted.channels]}, files, root)


def _key_of_part(source: ArraySource, part: Part, wanted: ImageFormat) -> str:
    return source.key if _as_it_is(source, wanted) else f"{source.key}-{part}-{wanted.channels}x{wanted.size}"


def _as_it_is(source: ArraySource, wanted: ImageFormat) -> bool:
    return (source.format.size, source.format.channels) == (wanted.size, wanted.channels)


class _Place(NamedTuple):
    path: str
    part: Part
    at: int


def _places(source: FolderSource) -> list[_Place]:
    """All images in the order of their paths, which is the same for any division into parts."""
    return sorted(_Place(path, part, at) for part in PARTS for at, path in enumerate(source.paths[part]))


def _hold_folder(source: FolderSource, image_format: ImageFormat, labels: Mapping[Part, Labels]) -> Held:
    places, shape = _places(source), (image_format.channels, image_format.size, image_format.size)

    def load(place: _Place) -> Images | str:
        """The image, or why there is none."""
        try:
            return source.load(place.part, np.array([place.at]))[0].reshape(shape)
        except UnreadableImageError as error:
            return str(error)

    def decode() -> Fresh:
        unread: dict[str, str] = {}
        return Fresh((len(places), *shape), pieces(unread), {"unread": unread})

    def pieces(unread: dict[str, str]) -> Iterator[Images]:
        many = max(PIECE_BYTES // int(np.prod(shape)), 1)
        pool = ThreadPoolExecutor(cores())
        try:
            for first in range(0, len(places), many):
                loaded = list(pool.map(load, places[first : first + many]))
                unread |= {str(first + n): one for n, one in enumerate(loaded) if isinstance(one, str)}
                yield np.stack([np.zeros(shape, np.uint8) if isinstance(one, str) else one for one in loaded])
        finally:
            pool.shutdown(cancel_futures=True)

    def sound(about: Mapping[str, Any]) -> bool:
        # What was wrong with them may have passed.
        return all(isinstance(load(places[int(row)]), str) for row in about["unread"])

    try:
        key = _key_of_folder(source, image_format)
    except OSError as error:
        raise UnreadableImageError(f"the image {error.filename} cannot be read: {error.strerror}") from error
    decoded = kept_or_decoded(key, decode, sound)
    rows: dict[Part, Indices] = {part: np.empty(source.count(part), np.int64) for part in PARTS}
    for row, place in enumerate(places):
        rows[place.part][place.at] = row
    unread = {int(row): why for row, why in decoded.about["unread"].items()}
    return Held(dict.fromkeys(PARTS, decoded.images), rows, labels, unread, decoded.problem)


def _fitted(source: ArraySource, part: Part, wanted: ImageFormat) -> tuple[Images, str | None]:
    """The images of a part in the wanted form, kept where the source says by what key; and a problem for the log."""
    whole = source.images[part]
    if _as_it_is(source, wanted):
        return whole, None
    if not source.key:
        return _fit(whole, wanted), None
    shape = (len(whole), wanted.channels, wanted.size, wanted.size)

    def decode() -> Fresh:
        many = max(PIECE_BYTES // (4 * int(np.prod(shape[1:]))), 1)
        return Fresh(shape, (_fit(whole[first : first + many], wanted) for first in range(0, len(whole), many)))

    decoded = kept_or_decoded(_key_of_part(source, part, wanted), decode)
    return decoded.images, decoded.problem


def _fit(images: Images, wanted: ImageFormat) -> Images:
    import torch

    from engine.data.augment.batch_ops import fit

    if images.shape[1:] == (wanted.channels, wanted.size, wanted.size):
        return images
    return fit(torch.from_numpy(np.array(images)), wanted).contiguous().numpy()
