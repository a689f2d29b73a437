"""WebDataset: images and labels in tar archives ("shards"), read in place without unpacking.

`engine.train.data.sources.tar_index` finds the images of the shards, and `engine.train.data.pack` writes shards of a
folder. The order of an epoch is that of any dataset: a function of seed, epoch and index over the images of all shards.
Images are read at random with pread(2).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from engine.base.errors import UsageError
from engine.base.files import is_file, is_folder, read_bytes
from engine.base.text import list_names, pluralize
from engine.config.data_sections import DataConfig
from engine.config.schema import Config
from engine.train.data.sampler import PARTS, Indices, Part, stratified_split
from engine.train.data.sources.base import (
    EncodedSource,
    Fingerprint,
    ImageFormat,
    Labels,
    UnreadableImageError,
    hash_names,
    hash_numbers,
)
from engine.train.data.sources.folder import encoded_format, usage_error_on_os_error
from engine.train.data.sources.folder_layout import PART_NAMES
from engine.train.data.sources.tar_index import ShardError, TarIndex, load_index, open_shard, shard_stamp

# ImageNet-22k has 4,096 shards.
MAX_SHARDS = 1 << 16
MAX_OPEN_SHARDS = 256
SET_SHARDS_ADVICE = "set it to the shards, such as shards/train-{000..146}.tar, or to their folder"
# Beside the shards, one name per line. The second is that of the CLIP benchmark.
CLASS_FILES = ("classes.txt", "classnames.txt")
MAX_CLASS_FILE_BYTES = 1 << 24
# Without a file of class names, the largest label decides how many outputs the model has.
MAX_CLASSES = 1 << 20
_BRACES = re.compile(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}")


@dataclass(frozen=True)
class TarSource(EncodedSource):
    """Images in tar archives. `rows` are those of the index, ascending. `skipped` are unusable members and shards."""

    shards: tuple[str, ...]
    index: TarIndex
    format: ImageFormat
    classes: tuple[str, ...]
    rows: dict[Part, Indices]
    labels: dict[Part, Labels]
    skipped: tuple[str, ...]

    def fingerprint(self, part: Part) -> Fingerprint:
        rows = self.rows[part]
        names, sizes = hash_numbers(self.index.key_digests[rows]), hash_numbers(self.index.sizes[rows])
        return Fingerprint(names, hash_numbers(self.labels[part]), sizes)

    def describe(self, part: Part, index: int) -> str:
        row = self.rows[part][index]
        return f"{self.shards[self.index.shards[row]]}: {self.index.image_names()[row]}"

    def read_encoded(self, part: Part, index: int) -> bytes:
        row = self.rows[part][index]
        number, size = self.index.shards[row], int(self.index.sizes[row])
        path, stamp = self.shards[number], self.index.stamps[number]
        try:
            # Another thread may evict the file from the cache meanwhile, which closes it when nobody holds it.
            file = _open_cached(path, int(stamp[0]), int(stamp[1]))
            data, is_same = os.pread(file.fileno(), size, self.index.offsets[row]), shard_stamp(file) == tuple(stamp)
        except ShardError as error:
            raise UnreadableImageError(str(error)) from error
        except OSError as error:
            raise UnreadableImageError(f"the shard {path} cannot be read: {error.strerror}") from error
        if not is_same:
            raise UnreadableImageError(f"the shard {path} has changed since it was indexed; start the run again")
        return data

    def cache_key(self, part: Part) -> str:
        numbers, rows = np.unique(self.index.shards[self.rows[part]], return_inverse=True)
        arrays = (self.index.stamps[numbers], rows, self.index.offsets[self.rows[part]])
        paths = [os.path.realpath(self.shards[number]) for number in numbers.tolist()]
        return hash_names([*paths, *map(hash_numbers, arrays)])

    def image_names(self, part: Part) -> list[str]:
        """Return the name of each image: the file name of its shard, and its member."""
        shard_names, names = [Path(shard).name for shard in self.shards], self.index.image_names()
        rows = self.rows[part].tolist()
        numbers = self.index.shards[self.rows[part]].tolist()
        return [f"{shard_names[number]}/{names[row]}" for number, row in zip(numbers, rows, strict=True)]


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _open_cached(path: str, _size: int, _mtime_ns: int) -> BinaryIO:
    """Open a shard of this size and modification time. Raises ShardError.

    The file is closed when it has left the cache and no thread reads from it."""
    return open_shard(path)


@usage_error_on_os_error()
def open_webdataset(config: Config) -> TarSource:
    """Index the shards of a config, or read their index. Raises UsageError."""
    data = config.data
    shards, skipped = _find_shards(data)
    index = _load_index(shards)
    classes = _class_names(data, index, shards)
    is_val = index.shards >= len(shards["train"])
    rows: dict[Part, Indices]
    if "val" in shards:
        rows = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
    else:
        rows = dict(zip(PARTS, stratified_split(index.labels, data.val_split, config.run.seed), strict=True))
    labels: dict[Part, Labels] = {part: index.labels[rows[part]].astype(np.int64) for part in PARTS}
    paths = tuple(path for names in shards.values() for path in names)
    return TarSource(paths, index, encoded_format(data), classes, rows, labels, (*skipped, *index.skipped))


@usage_error_on_os_error()
def class_names(config: Config) -> tuple[str, ...]:
    """Return the class names of the shards of a config without opening any image. Raises UsageError."""
    shards, _ = _find_shards(config.data)
    return _class_names(config.data, _load_index(shards), shards)


def _load_index(shards: dict[Part, list[str]]) -> TarIndex:
    """Return the index of the shards of all parts. Raises UsageError."""
    try:
        index = load_index([path for paths in shards.values() for path in paths])
    except ShardError as error:
        raise UsageError.one("data.path", str(error), code=error.code) from error
    if not len(index.labels):
        skipped = f" ({list_names(index.skipped)})" if index.skipped else ""
        reason, advice = f"the shards contain no image{skipped}", "they need members such as 0001.jpg and 0001.cls"
        raise UsageError.one("data.path", reason, advice, code="no-images")
    return index


def _find_shards(data: DataConfig) -> tuple[dict[Part, list[str]], list[str]]:
    """Return the shards of training and, if there are some, those of validation, and the files that are not used.

    In a folder, the names of the shards begin with those of their parts. Raises UsageError."""
    folder, skipped = Path(str(data.path)), list[str]()
    shards: dict[Part, list[str]] = {}
    if is_folder(folder):
        for path in sorted(folder.glob("*.tar")):
            part = PART_NAMES.get(re.split(r"[-_.]", path.name)[0].casefold(), "train")
            shards.setdefault(part, []).append(str(path))
        skipped += (f"{path} (shards of a test are not evaluated)" for path in shards.pop("test", ()))
        if "train" not in shards:
            reason = f"{folder} contains no shard for training"
            raise UsageError.one("data.path", reason, SET_SHARDS_ADVICE, code="not-found")
    else:
        shards["train"] = _named_shards("data.path", str(data.path))
    if data.val_path is not None:
        shards["val"] = _named_shards("data.val_path", data.val_path)
    return {part: shards[part] for part in PARTS if part in shards}, skipped


def _named_shards(key: str, pattern: str) -> list[str]:
    """Return the files that a brace pattern names. Raises UsageError if one is missing."""
    paths = [pattern] if is_file(pattern) else list(islice(expand_braces(pattern), MAX_SHARDS + 1))
    if len(paths) > MAX_SHARDS:
        reason = f"{pattern} stands for more than {MAX_SHARDS:,} files"
        raise UsageError.one(key, reason, "name fewer shards", code="too-many")
    missing = [path for path in paths if not is_file(path)]
    if len(missing) == len(paths):
        raise UsageError.one(key, f"{pattern} does not exist or is no file", SET_SHARDS_ADVICE, code="not-found")
    if missing:
        reason = f"{len(missing)} of {len(paths)} shards do not exist ({list_names(missing)})"
        raise UsageError.one(key, reason, "add them, or shorten the range in braces", code="not-found")
    return paths


def expand_braces(pattern: str) -> Iterator[str]:
    """Yield what a pattern such as `train-{000..146}.tar` or `{train,extra}-0.tar` stands for, as in WebDataset."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, last, names = match.groups()
    choices = names.split(",") if names else (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    for choice in choices:
        yield from (f"{pattern[: match.start()]}{choice}{tail}" for tail in expand_braces(pattern[match.end() :]))


def _class_names(data: DataConfig, index: TarIndex, shards: dict[Part, list[str]]) -> tuple[str, ...]:
    """Return the names in a text file beside the shards, one per line; else "0", "1" and so on."""
    needed = int(index.labels.max()) + 1
    example = f"{index.image_names()[int(index.labels.argmax())]} has the class index {needed - 1}"
    if needed > MAX_CLASSES:
        reason = f"{example}, but at most {MAX_CLASSES:,} classes are supported"
        raise UsageError.one("data.path", reason, code="too-many")
    for file in map(Path(shards["train"][0]).with_name, CLASS_FILES):
        if not file.is_file():
            continue
        try:
            names = parse_class_names(read_bytes(file.resolve(), MAX_CLASS_FILE_BYTES))
        except UnicodeDecodeError as error:
            raise UsageError.one("data.path", f"{file} is not UTF-8 text", code="wrong-format") from error
        if len(names) < needed:
            reason = f"{file} has {pluralize(len(names), 'class name')}, but {example}"
            raise UsageError.one("data.path", reason, "add the missing names, or remove the file", code="bad-label")
        return names
    return tuple(map(str, range(max(needed, data.num_classes or 0))))


def parse_class_names(content: bytes) -> tuple[str, ...]:
    """Return the class names in a file, with the class index behind those that several classes have.

    The ImageNet names of CLIP have "missile" and "sunglasses" twice (openai/CLIP#235), and an evaluation finds the
    classes of a model by name. Raises UnicodeDecodeError."""
    names = [line.strip() for line in content.decode().splitlines() if line.strip()]
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names))
