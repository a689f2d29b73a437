"""Built-in, torchvision and folder sources: images, labels, splits, skipped files and invalid data."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import os
import pickle
import stat
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.batching import build_sampler, check_source, class_counts, empty_class_warnings
from engine.data.sources import folder, image_file
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source, open_source_for_preflight
from engine.utils.errors import UsageError

Pixels = np.ndarray


def config(*overrides: str) -> Config:
    return resolve_config(None, overrides).config


def write_image(path: Path, size: tuple[int, int] = (40, 30), color: object = (200, 30, 30), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)  # type: ignore[arg-type]
    return path


@pytest.fixture(autouse=True)
def isolated_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def animal_folder(tmp_path: Path) -> Path:
    for name, color in (("cat", (250, 0, 0)), ("dog", (0, 250, 0))):
        for number in range(10):
            write_image(tmp_path / "animals" / name / f"{number}.png", (30 + number, 50 - number), color)
    return tmp_path / "animals"


def open_folder(root: Path, *overrides: str) -> object:
    return open_source(config("data.dataset=folder", f"data.path={root}", "data.image_size=16", *overrides))


def usage_error(root: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        open_folder(root, *overrides)
    return str(caught.value)


def test_digits_source_has_1797_images_of_ten_classes() -> None:
    source = open_source(config())
    assert source.num_images("train") + source.num_images("val") == 1797
    assert source.classes == tuple("0123456789")
    images, labels = source.load("val", np.arange(source.num_images("val")))
    assert (images.shape[1:], images.dtype, images.max()) == ((1, 8, 8), np.uint8, 255)
    assert np.bincount(labels).min() > 30


def test_digits_source_mean_and_std_match_images() -> None:
    source = open_source(config())
    images = (
        np.concatenate([source.load(part, np.arange(source.num_images(part)))[0] for part in ("train", "val")]) / 255
    )
    assert images.mean() == pytest.approx(source.format.mean[0], abs=0.002)
    assert images.std() == pytest.approx(source.format.std[0], abs=0.002)


def write_idx(path: Path, values: Pixels, compressed: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if compressed else data)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_source_reads_idx_files(tmp_path: Path, name: str, folder: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 28, 28))
    for part, count in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / folder / "raw" / f"{part}-images-idx3-ubyte", images[:count])
        write_idx(tmp_path / folder / "raw" / f"{part}-labels-idx1-ubyte", np.arange(count))
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
    with pytest.raises(UsageError, match=r"cifar10 in .* cannot be read: .*/data_batch_1 changed while it was read"):
        open_source(config("data.dataset=cifar10", f"data.path={tmp_path}"))
    assert not (tmp_path / "ran").exists()


def test_image_set_source_rejects_damaged_file(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            write_idx(tmp_path / "MNIST" / "raw" / f"{part}-{kind}-ubyte", np.zeros(3))
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"torn")
    with pytest.raises(UsageError, match=r"data\.path: mnist in .* cannot be read"):
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}"))


def test_failed_download_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Error downloading train-images:\nTried x, got:\n<urlopen error>\n")

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)
    with pytest.raises(UsageError) as refused:
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}/new/data", "data.download=true"))
    assert str(refused.value) == (
        f"data.path: mnist cannot be downloaded to {tmp_path}/new/data: Error downloading train-images: Tried x, got: "
        "<urlopen error>; check the network, or copy MNIST/raw there"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("locks_folders", [True, False])
def test_download_locks_folder_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks_folders: bool
) -> None:
    found: list[str] = []
    flock = fcntl.flock

    def lock_files_only(handle: int, operation: int) -> None:
        # As on NFS.
        if not locks_folders and stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, operation)

    def fail(*_: object, **__: object) -> None:
        found.extend(sorted(path.name for path in tmp_path.rglob("*")))
        raise RuntimeError("no network")

    monkeypatch.setattr("fcntl.flock", lock_files_only)
    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)
    with pytest.raises(UsageError, match="no network"):
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}", "data.download=true"))
    # A rank that is killed here leaves what is there now.
    assert found == (["MNIST", "raw"] if locks_folders else [".download.lock", "MNIST", "raw"])
    assert list(tmp_path.iterdir()) == []


def test_download_waits_for_another_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, attempts = tmp_path / "MNIST" / "raw", []
    failing, waiting = threading.Event(), threading.Event()

    def fail(*_: object, **__: object) -> None:
        attempts.append(raw.is_dir())
        if len(attempts) == 1:
            failing.set()
            # Until the second download has opened the folder that this one deletes.
            assert waiting.wait(30)
        raise RuntimeError("no network")

    flock = fcntl.flock

    def announce(handle: int, operation: int) -> None:
        if failing.is_set():
            waiting.set()
        flock(handle, operation)

    monkeypatch.setattr("torchvision.datasets.MNIST.download", fail)
    monkeypatch.setattr("fcntl.flock", announce)

    def download() -> None:
        with pytest.raises(UsageError, match="no network"):
            open_source(config("data.dataset=mnist", f"data.path={tmp_path}", "data.download=true"))

    with ThreadPoolExecutor() as pool:
        first = pool.submit(download)
        assert failing.wait(30)
        second = pool.submit(download)
        first.result(60), second.result(60)
    assert attempts == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_download_into_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as refused:
        open_source(config("data.dataset=mnist", f"data.path={tmp_path}/file", "data.download=true"))
    assert str(refused.value) == (
        f"data.path: {tmp_path}/file/MNIST/raw cannot be created and locked: Not a directory; choose a folder that you "
        "can write to"
    )


def test_fake_source_has_requested_count_and_size() -> None:
    fake_config = config("data.dataset=fake", "data.image_size=20", "data.num_classes=4", "data.fake_train=50")
    source = open_source(fake_config)
    images, labels = source.load("train", np.arange(8))
    assert (images.shape, source.num_images("train"), labels.tolist()) == ((8, 3, 20, 20), 50, [0, 1, 2, 3, 0, 1, 2, 3])
    assert (images == open_source(fake_config).load("train", np.arange(8))[0]).all()
    assert (images != open_source(fake_config).load("val", np.arange(8))[0]).any()


def test_folder_source_splits_by_class_and_resizes(animal_folder: Path) -> None:
    source = open_folder(animal_folder)
    assert source.classes == ("cat", "dog")
    assert (source.num_images("train"), source.num_images("val")) == (16, 4)
    images, labels = source.load("val", np.arange(4))
    assert (images.shape, labels.tolist()) == ((4, 3, 16, 16), [0, 0, 1, 1])
    assert images[0, :, 8, 8].tolist() == [250, 0, 0]


def test_folder_source_uses_train_and_val_folders(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2)):
        for name in ("a", "b"):
            for number in range(count):
                write_image(tmp_path / part / name / f"{number}.jpg")
    source = open_folder(tmp_path)
    assert (source.num_images("train"), source.num_images("val")) == (6, 4)


def test_folder_source_rejects_class_only_in_val(tmp_path: Path) -> None:
    for path in ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"):
        write_image(tmp_path / path)
    assert f"{tmp_path / 'val' / 'c'} is not a class of" in usage_error(tmp_path)


def test_folder_source_lists_broken_and_foreign_files_as_skipped(animal_folder: Path) -> None:
    whole = write_image(animal_folder / "cat" / "large.jpg", (300, 300)).read_bytes()
    (animal_folder / "cat" / "large.jpg").unlink()
    (animal_folder / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    png = (animal_folder / "dog" / "1.png").read_bytes()
    (animal_folder / "dog" / "cut.png").write_bytes(png[: len(png) // 2])
    (animal_folder / "dog" / "empty.png").write_bytes(b"")
    (animal_folder / "dog" / "notes.txt").write_text("not a picture")
    (animal_folder / "dog" / ".hidden").write_text("ignored")
    source = open_folder(animal_folder)
    assert source.num_images("train") + source.num_images("val") == 20
    assert [line.split(" ")[0] for line in source.skipped] == [
        "cat/cut.jpg",
        "dog/cut.png",
        "dog/empty.png",
        "dog/notes.txt",
    ]
    assert "dog/notes.txt (not an image)" in source.skipped


def test_folder_source_accepts_trailing_bytes_after_jpeg(animal_folder: Path) -> None:
    path = write_image(animal_folder / "cat" / "extra.jpg")
    path.write_bytes(path.read_bytes() + b"camera notes")
    source = open_folder(animal_folder)
    assert (source.num_images("train") + source.num_images("val"), source.skipped) == (21, ())


def test_folder_source_rejects_empty_class_with_remedy(animal_folder: Path) -> None:
    eel = animal_folder / "eel"
    eel.mkdir()
    advice = "add images, delete the folder, or keep its class with data.allow_empty=true"
    assert usage_error(animal_folder) == f"data.path: the class folder {eel} contains no readable image; {advice}"
    (eel / "notes.txt").write_text("no eels yet")
    (eel / "cut.png").write_bytes((animal_folder / "dog" / "1.png").read_bytes()[:40])
    message = usage_error(animal_folder)
    assert "contains no readable image (cut.png: not an image, " in message and "notes.txt: not an image)" in message
    for name in ("ant", "fox", "yak"):
        (animal_folder / name).mkdir()
    names = "4 class folders of {} contain no readable image (ant, eel, fox and 1 more); add images, delete"
    assert names.format(animal_folder) in usage_error(animal_folder)


def test_folder_source_keeps_empty_class_if_allowed(animal_folder: Path) -> None:
    (animal_folder / "bee").mkdir()
    (animal_folder / "bee" / "notes.txt").write_text("no bees yet")
    source = open_source(config("data.dataset=folder", f"data.path={animal_folder}", "data.allow_empty=true"))
    assert source.classes == ("bee", "cat", "dog")
    assert (source.num_images("train"), source.num_images("val")) == (16, 4)
    assert class_counts(source).tolist() == [0, 8, 8]
    [warning] = empty_class_warnings(source)
    assert str(warning) == "data.allow_empty: a class has no training image and cannot be learned: bee"


def test_folder_source_rejects_folder_without_any_image(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.csv").write_text("1,2")
    message = f"{tmp_path} contains no readable image (table.csv: not an image, table.csv: not an image); add images"
    for overrides in ((), ("data.allow_empty=true",)):
        assert message in usage_error(tmp_path, *overrides)


def test_folder_source_skips_png_with_flipped_byte(animal_folder: Path) -> None:
    path = animal_folder / "cat" / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)).save(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert [line.split(" ")[0] for line in open_folder(animal_folder).skipped] == ["cat/noise.png"]


def test_folder_source_rechecks_broken_file_when_changed(animal_folder: Path) -> None:
    path = animal_folder / "cat" / "late.png"
    path.write_bytes(b"not yet")
    assert open_folder(animal_folder).skipped == ("cat/late.png (not an image)",)
    write_image(path)
    assert open_folder(animal_folder).skipped == ()
    assert open_folder(animal_folder).skipped == (), "read from the cache"
    path.write_bytes(b"no longer")
    assert open_folder(animal_folder).skipped == ("cat/late.png (not an image)",)


def test_folder_source_rechecks_recorded_file_when_formats_change(
    animal_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(animal_folder / "cat" / "old.pcx")
    assert open_folder(animal_folder).skipped == ()
    for module in (image_file, folder):
        monkeypatch.setattr(module, "IMAGE_FORMATS", ("PNG",), raising=False)
    reason = "an image in the format PCX, which is not supported; convert it to PNG"
    assert open_folder(animal_folder).skipped == (f"cat/old.pcx ({reason})",)


def test_folder_source_skips_named_pipe(animal_folder: Path) -> None:
    os.mkfifo(animal_folder / "cat" / "pipe.png")
    assert open_folder(animal_folder).skipped == ("cat/pipe.png (not a file)",)


def test_folder_source_ignores_symlink_cycle(animal_folder: Path) -> None:
    (animal_folder / "cat" / "loop").symlink_to(animal_folder / "cat")
    (animal_folder / "dog" / "elsewhere").symlink_to(animal_folder.parent / "more")
    write_image(animal_folder.parent / "more" / "extra.png")
    source = open_folder(animal_folder)
    assert source.num_images("train") + source.num_images("val") == 21


def test_folder_source_rejects_split_folders_with_unknown_names(tmp_path: Path) -> None:
    for part in ("training", "validation"):
        write_image(tmp_path / part / "a" / "1.png")
    assert "contains splits, not classes (training, validation)" in usage_error(tmp_path)


def test_folder_source_allows_class_named_train(tmp_path: Path) -> None:
    for name in ("plane", "train"):
        for number in range(2):
            write_image(tmp_path / name / f"{number}.png")
    assert open_folder(tmp_path, "data.val_split=0.5").classes == ("plane", "train")


def test_folder_source_rejects_empty_val(tmp_path: Path) -> None:
    for path in ("train/a/1.png", "train/b/1.png"):
        write_image(tmp_path / path)
    (tmp_path / "val").mkdir()
    assert f"{tmp_path / 'val'} contains no readable image; add images, or delete this folder to split" in usage_error(
        tmp_path
    )


@pytest.mark.parametrize(("names", "message"), [((), "contains no folder"), (("one",), "contains only the folder one")])
def test_folder_source_rejects_fewer_than_two_classes(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for name in names:
        write_image(tmp_path / name / "1.png")
    assert message in usage_error(tmp_path)


def test_folder_source_converts_all_image_modes_to_requested_channels(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(tmp_path / name / "rgb.png", color=(90, 90, 90))
        write_image(tmp_path / name / "gray.png", mode="L", color=90)
        write_image(tmp_path / name / "alpha.png", mode="RGBA", color=(90, 90, 90, 255))
        write_image(tmp_path / name / "cmyk.jpg", mode="CMYK", color=(0, 0, 0, 165))
        write_image(tmp_path / name / "palette.gif", mode="P", color=0)
        Image.fromarray(np.full((30, 40), 90 * 257, np.uint16)).save(tmp_path / name / "deep.png")
    for channels in (1, 3):
        source = open_folder(tmp_path, f"data.channels={channels}", "data.val_split=0.5")
        paths = source.paths["train"]
        images, _ = source.load("train", np.arange(len(paths)))
        assert images.shape[1:] == (channels, 16, 16)
        for path, image in zip(paths, images, strict=True):
            assert "palette" in path or abs(int(image.mean()) - 90) <= 2, path


def test_folder_source_applies_exif_orientation(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3), np.uint8)
    pixels[:16] = 255
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 3
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(2):
            image.save(tmp_path / name / f"{number}.jpg", exif=exif, quality=95)
    source = open_folder(tmp_path, "data.val_split=0.5")
    images, _ = source.load("train", np.array([0]))
    assert images[0, :, 2].mean() < 20
    assert images[0, :, 13].mean() > 235


def test_folder_source_names_vanished_image(animal_folder: Path) -> None:
    source = open_folder(animal_folder)
    deleted = animal_folder / source.paths["train"][0]
    deleted.unlink()
    with pytest.raises(UnreadableImageError, match=str(deleted)):
        source.load("train", np.array([0]))


def test_image_format_prefers_config_over_dataset() -> None:
    custom_config = config("data.image_size=12", "data.channels=3")
    image_format = model_input_format(custom_config, open_source(custom_config))
    assert (image_format.size, image_format.channels, len(image_format.mean), len(image_format.std)) == (12, 3, 3, 3)


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
