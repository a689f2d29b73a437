"""WebDataset: images and labels in tar archives ("shards"), read in place without unpacking.

`engine.data.sources.tar_index` finds the images of a shard. The order of an epoch is that of any dataset: a function of
seed, epoch and index over the images of all shards. Images are read at random with pread(2).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.data_sections import DataConfig
from engine.data.fingerprint import Fingerprint, hash_integers
from engine.data.sampler import PARTS, Indices, Part, stratified_split
from engine.data.sources.base import ImageFormat, Labels, UnreadableImageError
from engine.data.sources.braces import expand_braces
from engine.data.sources.encoded import EncodedImage, EncodedSource
from engine.data.sources.folder import ALLOW_EMPTY, encoded_format
from engine.data.sources.readahead import advise_ranges
from engine.data.sources.shard_files import CHANGED, DescriptorCache
from engine.data.sources.tar_headers import BLOCK_BYTES, ShardError, header_name, parse_number
from engine.data.sources.tar_index import COLUMNS
from engine.data.sources.tar_index_cache import (
    IndexedShard,
    delete_unused_indices,
    index_shard,
    read_columns,
    read_names,
)
from engine.utils.errors import CodedError, Problem, UsageError
from engine.utils.files import is_file, is_folder, read_bytes
from engine.utils.text import list_names, pluralize, printable
from engine.utils.threads import CancellingPool

# ImageNet-22k has 4,096 shards.
MAX_SHARDS = 1 << 16
# More threads than cores: they wait for the disk, or for a network file system.
INDEX_THREADS = 16
PROGRESS_SECONDS = 2.0
MAX_PROBLEMS = 3
SET_SHARDS_ADVICE = "set it to the shards, such as shards/train-{000..146}.tar"
# Beside the shards, one name per line. The second is that of the CLIP benchmark.
CLASS_FILES = ("classes.txt", "classnames.txt")
MAX_CLASS_FILE_BYTES = 1 << 24
# Without a file of class names, the largest label decides how many outputs the model has.
MAX_CLASSES = 1 << 20


@dataclass(frozen=True)
class TarPart:
    """Images of one part, in the order of the shards. Those of shard i are `ends[i - 1]` to `ends[i]`.

    `blocks` are the offsets of the images in their shards in units of 512 bytes.
    """

    shards: tuple[IndexedShard, ...]
    ends: NDArray[np.int64]
    blocks: NDArray[np.uint32]
    sizes: NDArray[np.uint32]
    labels: Labels
    fingerprint: Fingerprint

    def shard_of(self, index: int) -> IndexedShard:
        return self.shards[int(np.searchsorted(self.ends, index, side="right"))]


@dataclass(frozen=True)
class TarSource(EncodedSource):
    """Images in tar archives. `skipped` are unusable members of the shards."""

    data: DataConfig
    seed: int
    format: ImageFormat
    classes: tuple[str, ...]
    parts: dict[Part, TarPart]
    skipped: tuple[str, ...]
    descriptors: DescriptorCache = field(default_factory=DescriptorCache, compare=False)

    def num_images(self, part: Part) -> int:
        return len(self.parts[part].sizes)

    def get_labels(self, part: Part) -> Labels:
        return self.parts[part].labels

    def fingerprint(self, part: Part) -> Fingerprint:
        return self.parts[part].fingerprint

    def read_encoded(self, part: Part, index: int) -> EncodedImage:
        images = self.parts[part]
        shard = images.shard_of(index)
        offset, size = int(images.blocks[index]) * BLOCK_BYTES, int(images.sizes[index])
        try:
            file = self.descriptors.get(shard)
            # The header is in front of the content. One read returns both.
            data = os.pread(file.fd, BLOCK_BYTES + size, offset - BLOCK_BYTES)
            is_same = _has_size(data, size) and file.is_unchanged()
        except (OSError, ShardError) as error:
            raise UnreadableImageError(f"the shard {shard.path} {_describe(error)}") from error
        if not is_same:
            raise UnreadableImageError(f"the shard {shard.path} {CHANGED}")
        return EncodedImage(memoryview(data)[BLOCK_BYTES:], lambda: f"{shard.path}: {_member_name(data, offset)}")

    @property
    def cache_root(self) -> str:
        return "webdataset"

    def cache_stamp(self, part: Part, index: int) -> bytes:
        images = self.parts[part]
        shard = images.shard_of(index)
        place = os.fsencode(os.path.realpath(shard.path)), shard.stamp.size, shard.stamp.mtime_ns, images.blocks[index]
        return b"%s\0%d\0%d\0%d" % place

    def image_names(self, part: Part) -> list[str]:
        """Return the name of each image: the file name of its shard, and its member. They are read again each time.

        Raises UsageError if a shard has changed.
        """
        images, names, start = self.parts[part], list[str](), 0
        for shard, end in zip(images.shards, images.ends.tolist(), strict=True):
            blocks = np.empty(shard.num_images, np.uint32)
            try:
                read_columns(shard, {"blocks": blocks})
                members = read_names(shard)
            except (OSError, ShardError) as error:
                raise UsageError([_shard_problem("data.path", shard.path, error, "start again")]) from error
            rows = np.searchsorted(blocks, images.blocks[start:end]).tolist()
            names += [f"{Path(shard.path).name}/{os.fsdecode(members[row])}" for row in rows]
            start = end
        return names

    def prepare(self, part: Part, indices: Indices) -> None:
        images = self.parts[part]
        shards = np.searchsorted(images.ends, indices, side="right")
        for number in np.unique(shards).tolist():
            chosen = indices[shards == number]
            with suppress(OSError, ShardError):
                # The header before each content is read with it.
                offsets = (images.blocks[chosen].astype(np.int64) - 1) * BLOCK_BYTES
                fd = self.descriptors.get(images.shards[number]).fd
                advise_ranges(fd, offsets, images.sizes[chosen].astype(np.int64) + BLOCK_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the config if the indices are in the user's cache: a million images take 20 MB."""
        if all(shard.index is None for part in self.parts.values() for shard in part.shards):
            fingerprints = {part: self.fingerprint(part) for part in PARTS}
            return _reopen, (self.data, self.seed, fingerprints)
        return TarSource, (self.data, self.seed, self.format, self.classes, self.parts, self.skipped)


def open_webdataset(data: DataConfig, seed: int) -> TarSource:
    """Index the shards of a config, or read their indices. Raises UsageError."""
    loaded = _load_parts(data)
    classes = _class_names(data, loaded)
    _check_classes(data, loaded[0], classes)
    skipped = tuple(name for shards in loaded for name in shards.skipped)
    if len(loaded) == 1:
        parts = loaded[0].split(data.val_split, seed)
    else:
        parts = {part: shards.part() for part, shards in zip(PARTS, loaded, strict=True)}
    return TarSource(data, seed, encoded_format(data), classes, parts, skipped)


def class_names(data: DataConfig) -> tuple[str, ...]:
    """Return the class names of the shards of a config without opening any image. Raises UsageError."""
    return _class_names(data, _load_parts(data))


def _reopen(data: DataConfig, seed: int, fingerprints: Mapping[Part, Fingerprint]) -> TarSource:
    source = open_webdataset(data, seed)
    if any(source.fingerprint(part) != fingerprint for part, fingerprint in fingerprints.items()):
        reason = "the shards have changed while the run was starting"
        raise UsageError.one("data.path", reason, "start it again", code="data-changed")
    return source


@dataclass
class _LoadedShards:
    """All images of the shards that one config key names. `columns` are those of their indices."""

    key: str
    shards: tuple[IndexedShard, ...]
    ends: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(f"{shard.path}: {name}" for shard in self.shards for name in shard.skipped)

    @property
    def labels(self) -> NDArray[np.int32]:
        return self.columns["labels"]

    def split(self, val_split: float, seed: int) -> dict[Part, TarPart]:
        train, val = stratified_split(self.labels, val_split, seed)
        parts: dict[Part, TarPart] = {"val": self.part({name: self.columns[name][val] for name in COLUMNS}, val)}
        # One column after the other, because all of them twice take 40 MB with a million images.
        parts["train"] = self.part({name: self.columns.pop(name)[train] for name in COLUMNS}, train)
        return parts

    def part(self, columns: Mapping[str, NDArray[Any]] | None = None, indices: Indices | None = None) -> TarPart:
        """Return a part with all images, or with `columns` of the images at ascending `indices`."""
        columns = columns or self.columns
        names, labels, sizes = (hash_integers(columns[name]) for name in ("key_digests", "labels", "sizes"))
        return TarPart(
            shards=self.shards,
            ends=self.ends if indices is None else np.searchsorted(indices, self.ends),
            blocks=columns["blocks"],
            sizes=columns["sizes"],
            labels=columns["labels"].astype(np.int64),
            fingerprint=Fingerprint(names, labels, sizes),
        )

    def shard_of(self, index: int) -> IndexedShard:
        return self.shards[int(np.searchsorted(self.ends, index, side="right"))]


def _load_parts(data: DataConfig) -> list[_LoadedShards]:
    """Return the shards of training and, if the config has them, those of validation. Raises UsageError."""
    patterns = {"data.path": data.path, "data.val_path": data.val_path}
    return [_load_shards(key, pattern) for key, pattern in patterns.items() if pattern is not None]


def _load_shards(key: str, pattern: str) -> _LoadedShards:
    """Index all shards in parallel and load their indices. Raises UsageError with the problems of the first shards."""
    paths = _shard_paths(key, pattern)
    problems: list[Problem] = []
    shards: list[IndexedShard] = []
    with CancellingPool(min(INDEX_THREADS, len(paths))) as pool:
        futures = [pool.submit(index_shard, path) for path in paths]
        _show_progress(futures, pattern)
        for path, future in zip(paths, futures, strict=True):
            try:
                shards.append(future.result())
            except (OSError, ShardError) as error:
                problems.append(_shard_problem(key, path, error))
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise UsageError(problems)
    ends = np.cumsum([shard.num_images for shard in shards], dtype=np.int64)
    columns = {name: np.empty(ends[-1], kind) for name, kind in COLUMNS.items()}
    for shard, end in zip(shards, ends.tolist(), strict=True):
        place = slice(end - shard.num_images, end)
        try:
            read_columns(shard, {name: column[place] for name, column in columns.items()})
        except (OSError, ShardError) as error:
            raise UsageError([_shard_problem(key, shard.path, error)]) from error
    if any(shard.is_new for shard in shards):
        delete_unused_indices()
    loaded = _LoadedShards(key, tuple(shards), ends, columns)
    if not ends[-1]:
        reason = f"the shards contain no image{f' ({list_names(loaded.skipped)})' if loaded.skipped else ''}"
        raise UsageError.one(key, reason, "they need members such as 0001.jpg and 0001.cls", code="no-images")
    return loaded


def _shard_problem(key: str, path: str, error: OSError | ShardError, advice: str = "") -> Problem:
    code = "not-readable" if isinstance(error, OSError) else error.code
    return Problem(key, f"the shard {path} {_describe(error)}", advice, code=code)


def _describe(error: OSError | ShardError) -> str:
    """Return what is wrong with a shard, as a clause that follows its path."""
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


def _show_progress(futures: Sequence[Future[IndexedShard]], pattern: str) -> None:
    """Wait until all shards are indexed or `MAX_PROBLEMS` fail. Print how many are: after 2 s, 4 s, 8 s and so on."""
    seconds = PROGRESS_SECONDS
    while (waited := wait(futures, seconds)).not_done:
        if sum(future.exception() is not None for future in waited.done) >= MAX_PROBLEMS:
            break
        shards = pluralize(len(futures), "shard")
        print(f"indexing {printable(pattern)} once: {len(waited.done)} of {shards}", file=sys.stderr, flush=True)
        seconds *= 2


def _shard_paths(key: str, pattern: str) -> list[str]:
    """Return the files that a brace pattern names. Raises UsageError if one is missing."""
    if is_file(Path(pattern)):
        return [pattern]
    try:
        paths = expand_braces(pattern, MAX_SHARDS)
    except CodedError as error:
        raise UsageError.one(key, f"{pattern} {error}", "name fewer shards", code=error.code) from error
    if any(is_folder(Path(path)) for path in paths):
        raise UsageError.one(key, f"{pattern} is a folder", SET_SHARDS_ADVICE, code="not-a-file")
    missing = [path for path in paths if not is_file(Path(path))]
    if len(missing) == len(paths):
        raise UsageError.one(key, f"{pattern} does not exist or is no file", SET_SHARDS_ADVICE, code="not-found")
    if missing:
        reason = f"{len(missing)} of {len(paths)} shards do not exist ({list_names(missing)})"
        raise UsageError.one(key, reason, "add them, or shorten the range in braces", code="not-found")
    return paths


def _class_names(data: DataConfig, loaded: Sequence[_LoadedShards]) -> tuple[str, ...]:
    """Return the names in a text file beside the shards, one per line; else "0", "1" and so on."""
    greatest = max(loaded, key=lambda shards: int(shards.labels.max()))
    needed = int(greatest.labels.max()) + 1
    example = f"{greatest.shard_of(int(greatest.labels.argmax())).path} contains the class index {needed - 1}"
    if needed > MAX_CLASSES:
        reason = f"{example}, but at most {MAX_CLASSES:,} classes are supported"
        raise UsageError.one(greatest.key, reason, code="too-many")
    for file in map(Path(loaded[0].shards[0].path).with_name, CLASS_FILES):
        if not file.is_file():
            continue
        try:
            lines = read_bytes(file.resolve(), MAX_CLASS_FILE_BYTES).decode().splitlines()
        except OSError as error:
            reason = f"the class names {file} cannot be read: {error.strerror}"
            raise UsageError.one("data.path", reason, code="not-readable") from error
        except UnicodeDecodeError as error:
            raise UsageError.one("data.path", f"{file} is not UTF-8 text", code="wrong-format") from error
        names = tuple(line.strip() for line in lines if line.strip())
        if len(names) < needed:
            reason = f"{file} has {pluralize(len(names), 'class name')}, but the shard {example}"
            raise UsageError.one("data.path", reason, "add the missing names, or remove the file", code="bad-label")
        return _distinct(names)
    return tuple(map(str, range(max(needed, data.num_classes or 0))))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return the class names, with the class index behind those that several classes have.

    The ImageNet names of CLIP have "missile" and "sunglasses" twice (openai/CLIP#235), and an evaluation finds the
    classes of a model by name.
    """
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({index})" for index, name in enumerate(names))


def _check_classes(data: DataConfig, train: _LoadedShards, classes: Sequence[str]) -> None:
    """Raise UsageError if there are too few classes, or some without an image."""
    if len(classes) < 2:
        reason = "all images have the class index 0"
        raise UsageError.one("data.path", reason, "a dataset needs at least two classes", code="too-few-classes")
    counts = np.bincount(train.labels, minlength=len(classes))
    empty = [
        f"{index}" if name == str(index) else f"{index}, {name}"
        for index, name in enumerate(classes)
        if not counts[index]
    ]
    if empty and not data.allow_empty:
        subject = f"the class {empty[0]} has" if len(empty) == 1 else f"{len(empty)} of {len(classes)} classes have"
        examples = "" if len(empty) == 1 else f" ({list_names(empty)})"
        reason = f"{subject} no image in the shards{examples}"
        advice = f"count classes from 0, or keep them with {ALLOW_EMPTY}"
        raise UsageError.one("data.path", reason, advice, code="empty-class")


def _has_size(data: bytes, size: int) -> bool:
    """Whether `data` is the header of a member and its content of this size."""
    try:
        return len(data) == BLOCK_BYTES + size and parse_number(data[124:136]) == size
    except ShardError:
        return False


def _member_name(data: bytes, offset: int) -> str:
    """Return the name in the header before a content. A name of more than 100 bytes is incomplete."""
    name = header_name(data[:BLOCK_BYTES])
    text = printable(os.fsdecode(name))
    return text if data[99] == 0 else f"{text}… at byte {offset}"
