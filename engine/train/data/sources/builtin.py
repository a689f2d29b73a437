"""Built-in datasets: the digits shipped with gputrain, torchvision's MNIST and CIFAR variants, and synthetic images."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.base.errors import UsageError
from engine.base.files import cache_folder, exclusive_lock, is_file, make_user_folder
from engine.config.data_sections import DataConfig
from engine.train.data.sampler import PARTS, Indices, Part, stratified_split
from engine.train.data.sources.base import ArraySource, Fingerprint, ImageFormat, Images, ImageSource, Labels
from engine.train.data.sources.decoded_cache import (
    DECODED_FOLDER,
    DecodedChunks,
    DecodedMetadata,
    compute_cache_key,
    file_stamp,
    load_or_decode,
)
from engine.train.data.sources.formats import Preprocessing
from engine.train.data.sources.image import crop_images


@dataclass(frozen=True)
class _TorchvisionDataset:
    """A torchvision dataset: its class, its folder and files below `data.path`, its image format, and the numbers of
    training and validation images."""

    torchvision_class: str
    folder: str
    files: tuple[str, ...]
    format: ImageFormat
    counts: tuple[int, int]


_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

TORCHVISION_DATASETS = {
    "mnist": _TorchvisionDataset(
        "MNIST", "MNIST/raw", _IDX_FILES, ImageFormat(28, 1, (0.1307,), (0.3081,)), (60_000, 10_000)
    ),
    "fashion-mnist": _TorchvisionDataset(
        "FashionMNIST", "FashionMNIST/raw", _IDX_FILES, ImageFormat(28, 1, (0.2860,), (0.3530,)), (60_000, 10_000)
    ),
    "cifar10": _TorchvisionDataset(
        "CIFAR10",
        "cifar-10-batches-py",
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"),
        ImageFormat(32, 3, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        (50_000, 10_000),
    ),
    "cifar100": _TorchvisionDataset(
        "CIFAR100",
        "cifar-100-python",
        ("train", "test", "meta"),
        ImageFormat(32, 3, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        (50_000, 10_000),
    ),
}
# The largest file of CIFAR has 155 MB.
MAX_CIFAR_BYTES = 1 << 28
DIGITS_FORMAT = ImageFormat(8, 1, (0.305,), (0.376,))


def open_digits(data: DataConfig, seed: int) -> ArraySource:
    """Open the UCI optical digits, 8 x 8 grayscale; see digits.md."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        images = (stored["images"].astype(np.uint16) * 255 // 16).astype(np.uint8)[:, None]
        labels = stored["labels"].astype(np.int64)
    train, val = stratified_split(labels, data.val_split, seed)
    return ArraySource(
        DIGITS_FORMAT,
        tuple(str(digit) for digit in range(10)),
        {"train": images[train], "val": images[val]},
        {"train": labels[train], "val": labels[val]},
    )


def check_torchvision_files(data: DataConfig) -> None:
    """Raises UsageError if a file of a torchvision dataset is missing in `data.path` and `data.download` is false."""
    image_set, root = TORCHVISION_DATASETS[data.dataset], Path(str(data.path))
    if data.download:
        return
    missing = [name for name in image_set.files if not is_file(root / image_set.folder / name)]
    if missing:
        raise UsageError.one(
            "data.path",
            f"{data.dataset} is not in {root}: {root / image_set.folder / missing[0]} is missing",
            f"set data.path to the folder that contains {image_set.folder}, or download it with data.download=true",
            code="not-found",
        )


def open_torchvision_dataset(data: DataConfig, _: int) -> ArraySource:
    """Open a torchvision dataset from the decoded cache, or with torchvision if it is not cached. Raises UsageError."""
    image_set, root = TORCHVISION_DATASETS[data.dataset], Path(str(data.path))
    check_torchvision_files(data)
    if data.download:
        with _download_lock(root / image_set.folder):
            if any(not is_file(root / image_set.folder / name) for name in image_set.files):
                _read_torchvision_dataset(data)
    stamps = (file_stamp(root / image_set.folder / name, root) for name in image_set.files)
    key = compute_cache_key({"dataset": data.dataset}, stamps, str(root.resolve()))
    decoded = load_or_decode(key, lambda: _read_torchvision_dataset(data))
    metadata, num_train = decoded.metadata, len(decoded.metadata.labels["train"])
    return ArraySource(
        image_set.format,
        metadata.classes,
        {"train": decoded.images[:num_train], "val": decoded.images[num_train:]},
        {part: np.array(metadata.labels[part], np.int64) for part in PARTS},
        "" if decoded.warning else key,
        decoded.warning,
    )


def _read_torchvision_dataset(data: DataConfig) -> DecodedChunks:
    """Read a dataset with torchvision, which downloads it first if `data.download` is true. Raises UsageError."""
    from torchvision import datasets

    image_set, root = TORCHVISION_DATASETS[data.dataset], Path(str(data.path))
    torchvision_class: Any = getattr(datasets, image_set.torchvision_class)
    images: list[Images] = []
    labels: dict[Part, tuple[int, ...]] = {}
    classes: list[str] = []
    try:
        for part in PARTS:
            with _unpickle_only_published_files(torchvision_class):
                stored = torchvision_class(str(root), train=part == "train", download=data.download)
            pixels = np.asarray(stored.data, dtype=np.uint8)
            images.append(pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2))
            labels[part] = tuple(np.asarray(stored.targets, dtype=np.int64).tolist())
            classes = list(stored.classes)
    except (RuntimeError, OSError, EOFError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())
        if data.download:
            # torchvision names those of other datasets itself.
            address = f" from {torchvision_class.url}" if hasattr(torchvision_class, "url") else ""
            failed = f"{data.dataset} cannot be downloaded{address} to {root}: {reason}"
            advice = f"check the network, or copy {image_set.folder} there"
            raise UsageError.one("data.path", failed, advice, code="download-failed") from error
        raise UsageError.one(
            "data.path", f"{data.dataset} in {root} cannot be read: {reason}", code="not-readable"
        ) from error
    shape = (sum(map(len, images)), *images[0].shape[1:])
    return DecodedChunks(shape, images, lambda: DecodedMetadata(labels=labels, classes=tuple(classes)))


@contextmanager
def _unpickle_only_published_files(torchvision_class: Any) -> Iterator[None]:
    """Let torchvision unpickle only CIFAR files with the MD5 sums that it publishes. Other pickles can run any code.

    torchvision verifies the MD5 sum of a file and then opens it again, so its owner can replace it in between.
    """
    from torchvision.datasets import cifar

    def load(file: Any, encoding: str) -> Any:
        content = file.read(MAX_CIFAR_BYTES)
        published = {md5 for _, md5 in torchvision_class.train_list + torchvision_class.test_list}
        # Two files with the same MD5 sum can be made, but not a second one with the sum of a given file.
        if hashlib.md5(content, usedforsecurity=False).hexdigest() not in {*published, torchvision_class.meta["md5"]}:
            raise ValueError(f"{file.name} changed while it was read")
        return pickle.loads(content, encoding=encoding)

    original: Any = cifar.pickle
    setattr(cifar, "pickle", SimpleNamespace(load=load))  # noqa: B010 - the name is a module to mypy
    try:
        yield
    finally:
        setattr(cifar, "pickle", original)  # noqa: B010


@contextmanager
def _download_lock(folder: Path) -> Iterator[None]:
    """Let one process of this user download into a folder, where the user's cache can be written."""
    name = f"download-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.lock"
    with ExitStack() as lock:
        # Not in the folder itself, where the file would remain.
        with suppress(OSError):
            cache = make_user_folder(cache_folder(), DECODED_FOLDER)
            lock.enter_context(exclusive_lock(cache / name, private=True))
        yield


@dataclass(frozen=True)
class FakeSource(ImageSource):
    """Synthetic images, generated on load: each class is a bright square at a position of its own on noise."""

    format: ImageFormat
    classes: tuple[str, ...]
    counts: dict[Part, int]
    seed: int
    in_memory = True

    def num_images(self, part: Part) -> int:
        return self.counts.get(part, 0)

    def get_labels(self, part: Part) -> Labels:
        return np.arange(self.counts[part]) % len(self.classes)

    def fingerprint(self, part: Part) -> Fingerprint:
        """Return an empty fingerprint: seed, counts and classes determine the images."""
        return Fingerprint()

    def load(self, part: Part, indices: Indices, preprocessing: Preprocessing | None = None) -> tuple[Images, Labels]:
        labels = indices % len(self.classes)
        size, channels = self.format.size, self.format.channels
        images = np.empty((len(indices), channels, size, size), np.uint8)
        grid_size = max(int(np.ceil(np.sqrt(len(self.classes)))), 1)
        for row, (index, label) in enumerate(zip(indices, labels, strict=True)):
            noise = np.random.default_rng([self.seed, part == "train", int(index)])
            images[row] = noise.integers(0, 128, (channels, size, size), np.uint8)
            top, left = (int(label) // grid_size) * size // grid_size, (int(label) % grid_size) * size // grid_size
            images[row, :, top : top + max(size // grid_size, 1), left : left + max(size // grid_size, 1)] += 96
        images = crop_images(images, indices, preprocessing)
        return (images / np.float32(255) if self.format.is_float else images), labels


def open_fake(data: DataConfig, seed: int) -> FakeSource:
    """Open synthetic images of the configured size, channels, classes and counts."""
    channels = data.channels or 3
    return FakeSource(
        ImageFormat(data.max_train_size or 32, channels, (0.27,) * channels, (0.18,) * channels),
        tuple(f"class-{number}" for number in range(data.num_classes or 10)),
        {"train": data.fake_train, "val": data.fake_val},
        seed,
    )
