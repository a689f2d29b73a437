"""Built-in and torchvision sources: images, labels, downloads and invalid data, and the checks of any source."""

from __future__ import annotations

import hashlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.data.checks import build_sampler, check_source
from engine.train.data.sources.open import open_source, open_source_for_preflight
from support.data.mnist_files import write_mnist
from support.messages import raises_problem


def config(*overrides: str) -> Config:
    return resolve_config(None, overrides).config


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_digits_source_has_1797_images_of_ten_classes() -> None:
    source = open_source(config())
    assert source.num_images("train") + source.num_images("val") == 1797
    assert source.classes == tuple("0123456789")
    images, labels = source.load("val", np.arange(source.num_images("val")))
    assert (images.shape[1:], images.dtype, images.max()) == ((1, 8, 8), np.uint8, 255)
    assert np.bincount(labels).min() > 30


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_source_reads_idx_files(tmp_path: Path, name: str, folder: str) -> None:
    images = write_mnist(tmp_path, folder, train=6, val=4)
    mnist_config = config(f"data.dataset={name}", f"data.path={tmp_path}")
    assert open_source_for_preflight(mnist_config) is None
    source = open_source(mnist_config)
    assert (source.num_images("train"), source.num_images("val"), len(source.classes)) == (6, 4, 10)
    pixels, labels = source.load("train", np.array([5, 0]))
    assert (pixels[:, 0] == images[[5, 0]]).all()
    assert labels.tolist() == [5, 0]


CIFAR10_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def write_cifar10(root: Path, batch: object, meta: object) -> None:
    (root / "cifar-10-batches-py").mkdir()
    for name in CIFAR10_BATCHES:
        (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(batch))
    (root / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(meta))


def test_cifar10_source_reads_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    flat = np.random.default_rng(0).integers(0, 256, (2, 3072)).astype(np.uint8)
    batch, meta = {"data": flat, "labels": [3, 4]}, {"label_names": [f"c{number}" for number in range(10)]}
    write_cifar10(tmp_path, batch, meta)
    batch_md5, meta_md5 = (
        hashlib.md5(pickle.dumps(content), usedforsecurity=False).hexdigest() for content in (batch, meta)
    )
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [[name, batch_md5] for name in CIFAR10_BATCHES[:-1]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [[CIFAR10_BATCHES[-1], batch_md5]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {**datasets.CIFAR10.meta, "md5": meta_md5})
    source = open_source(config("data.dataset=cifar10", f"data.path={tmp_path}"))
    assert (source.num_images("train"), source.num_images("val"), source.classes[3]) == (10, 2, "c3")
    pixels, labels = source.load("val", np.array([1]))
    assert (pixels[0] == flat[1].reshape(3, 32, 32)).all()
    assert labels.tolist() == [4]


class CallWhenUnpickled:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.mark.parametrize(
    "call",
    [(Path.touch, Path("ran")), (np.ndarray, (1,), np.dtype("O"), b"A" * 8)],
    ids=["function", "array of pointers"],
)
def test_cifar10_source_does_not_unpickle_replaced_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[object, ...]
) -> None:
    from torchvision import datasets

    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path, CallWhenUnpickled(*call), {})
    # As if the files were replaced after torchvision has verified them.
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    with raises_problem("not-readable", "data.path", "cifar10 ", "/data_batch_1 "):
        open_source(config("data.dataset=cifar10", f"data.path={tmp_path}"))
    assert not (tmp_path / "ran").exists()


def test_image_set_source_rejects_damaged_file(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"torn")
    with raises_problem("not-readable", "data.path", "mnist ", f" {tmp_path} "):
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}"))


def test_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading train-images:\nTried x, got:\n<urlopen error>\n")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)
    cause = "Error downloading train-images: Tried x, got: <urlopen error>;"
    values = ("mnist ", f" {tmp_path}/new/data: ", cause, "MNIST/raw")
    with raises_problem("download-failed", "data.path", *values):
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}/new/data", "data.download=true"))


def test_failed_download_names_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    def fail(*_: object, **__: object) -> None:
        raise OSError("<urlopen error>")

    monkeypatch.setattr("torchvision.datasets.CIFAR10.download", fail)
    with raises_problem("download-failed", "data.path", datasets.CIFAR10.url, f" {tmp_path}: <urlopen error>"):
        open_source(config("data.dataset=cifar10", f"data.path={tmp_path}", "data.download=true"))


def test_downloads_of_two_ranks_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    inside, together = list[int](), list[int]()

    def fail(*_: object, **__: object) -> None:
        inside.append(1)
        time.sleep(0.05)
        together.append(len(inside))
        inside.pop()
        raise RuntimeError("no network")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)

    def download() -> None:
        with pytest.raises(UsageError, match="no network"):
            open_source(config("data.dataset=mnist", f"data.path={tmp_path}/data", "data.download=true"))

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(download) for _ in range(3)]:
            done.result(60)
    assert together == [1, 1, 1]
    assert not (tmp_path / "data").exists()


def test_check_source_reports_all_config_mismatches_together() -> None:
    bad_config = config("data.num_classes=3", "data.batch_size=2000", "data.mean=[0.1, 0.2]")
    source = open_source(bad_config)
    with pytest.raises(UsageError) as caught:
        check_source(bad_config, source, build_sampler(bad_config, source, 1))
    assert [problem.location for problem in caught.value.problems] == [
        "data.num_classes",
        "data.batch_size",
        "data.mean",
    ]
