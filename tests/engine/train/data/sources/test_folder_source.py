"""Folder source: classes, splits, image modes, and files that are skipped or refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.train.data.checks import class_counts
from engine.train.data.sampler import PARTS
from engine.train.data.sources import folder
from engine.train.data.sources.base import ImageSource, UnreadableImageError
from engine.train.data.sources.open import open_source
from support.data.found_folders import write_photos
from support.messages import has_problem, raises_problem, says


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


def open_folder(root: Path, *overrides: str) -> ImageSource:
    overrides = ("data.dataset=folder", f"data.path={root}", "data.image_size=16", *overrides)
    return open_source(resolve_config(None, overrides).config)


def is_refused(root: Path, code: str, *values: object, overrides: Sequence[str] = ()) -> bool:
    """Whether the folder is refused with one problem of this code and with these values."""
    with pytest.raises(UsageError) as caught:
        open_folder(root, *overrides)
    [problem] = caught.value.problems
    return has_problem([problem], code, "data.path", *values)


def test_folder_source_splits_by_class_and_resizes(animal_folder: Path) -> None:
    source = open_folder(animal_folder)
    assert source.classes == ("cat", "dog")
    assert (source.num_images("train"), source.num_images("val")) == (16, 4)
    images, labels = source.load("val", np.arange(4))
    assert (images.shape, labels.tolist()) == ((4, 3, 16, 16), [0, 0, 1, 1])
    assert images[0, :, 8, 8].tolist() == [250, 0, 0]


def test_folder_source_rejects_class_only_in_val(tmp_path: Path) -> None:
    for path in ("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png"):
        write_image(tmp_path / path)
    assert is_refused(tmp_path, "bad-label", f"{tmp_path / 'val' / 'c'} ", tmp_path / "train")


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
    assert any(says(line, "bad-image", "dog/notes.txt (") for line in source.skipped)


def test_folder_source_keeps_empty_class(animal_folder: Path) -> None:
    (animal_folder / "bee").mkdir()
    (animal_folder / "bee" / "notes.txt").write_text("no bees yet")
    source = open_folder(animal_folder)
    assert source.classes == ("bee", "cat", "dog")
    assert (source.num_images("train"), source.num_images("val")) == (16, 4)
    assert class_counts(source).tolist() == [0, 8, 8]


def test_folder_source_rejects_folder_without_any_image(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.csv").write_text("1,2")
    assert is_refused(tmp_path, "no-images", f"{tmp_path} ", "(a/table.csv (", ", b/table.csv (")


def test_folder_source_rechecks_broken_file_when_changed(animal_folder: Path) -> None:
    path = animal_folder / "cat" / "late.png"
    path.write_bytes(b"not yet")
    [skipped] = open_folder(animal_folder).skipped
    assert says(skipped, "bad-image", "cat/late.png (")
    write_image(path)
    assert open_folder(animal_folder).skipped == ()
    assert open_folder(animal_folder).skipped == (), "read from the cache"
    path.write_bytes(b"no longer")
    [skipped] = open_folder(animal_folder).skipped
    assert says(skipped, "bad-image", "cat/late.png (")


def test_folder_source_rechecks_file_with_unchanged_size_and_modification_time(animal_folder: Path) -> None:
    open_folder(animal_folder)
    damaged = min((animal_folder / "cat").iterdir())
    status = damaged.stat()
    damaged.write_bytes(bytes(status.st_size))
    os.utime(damaged, ns=(status.st_atime_ns, status.st_mtime_ns))
    [skipped] = open_folder(animal_folder).skipped
    assert skipped.startswith(f"cat/{damaged.name} ")


def test_folder_source_rejects_empty_val(tmp_path: Path) -> None:
    for path in ("train/a/1.png", "train/b/1.png"):
        write_image(tmp_path / path)
    (tmp_path / "val").mkdir()
    assert is_refused(tmp_path, "no-images", f"{tmp_path / 'val'} ", tmp_path / "train")
    (tmp_path / "val" / "a").mkdir()
    assert is_refused(tmp_path, "no-images", f"{tmp_path / 'val'} ", tmp_path / "train")


@pytest.mark.parametrize(
    ("copied", "to", "counts"),
    [
        ("train/a/0.jpg", "valid/a/9.jpg", {"val": 1}),
        ("train/a/0.jpg", "test/b/9.jpg", {"test": 1}),
        ("valid/a/0.jpg", "test/b/9.jpg", {"test": 1}),
        ("test/a/0.jpg", "test/b/9.jpg", {}),
        ("train/a/0.jpg", "train/b/9.jpg", {}),
    ],
)
def test_folder_source_counts_and_names_repeated_images(
    tmp_path: Path, copied: str, to: str, counts: dict[str, int]
) -> None:
    for place, part in enumerate(("train", "valid", "test")):
        for label, name in enumerate(("a", "b")):
            write_photos(tmp_path / part / name, 2, 100 * place + 10 * label)
    source, target = tmp_path / copied, tmp_path / to
    target.write_bytes(source.read_bytes())
    for _ in range(2):  # of the files, and of the record in the cache
        opened = open_folder(tmp_path)
        assert isinstance(opened, folder.FolderSource)
        assert len(opened.warnings) == len(counts)
        for part, count in counts.items():
            total = opened.num_images(part)  # type: ignore[arg-type]
            assert has_problem(opened.warnings, "images-repeated", "data.path", f"{count} of {total} ({to})")


def test_folder_source_counts_copies_on_both_sides_of_a_split(tmp_path: Path) -> None:
    for label, name in enumerate(("a", "b")):
        write_photos(tmp_path / name, 8, 100 * label)
    for number in range(8):
        (tmp_path / "a" / f"copy{number}.jpg").write_bytes((tmp_path / "a" / f"{number}.jpg").read_bytes())
    source = open_folder(tmp_path, "data.val_split=0.5")
    assert isinstance(source, folder.FolderSource)
    contents = {part: [(tmp_path / path).read_bytes() for path in source.paths[part]] for part in PARTS}
    repeated = sum(content in contents["train"] for content in contents["val"])
    assert repeated and has_problem(source.warnings, "images-repeated", "data.path", f"{repeated} of 12 (")


def test_folder_source_skips_system_folders_and_links_upward_in_classes(animal_folder: Path) -> None:
    write_image(animal_folder / "cat" / "@eaDir" / "0.png" / "SYNOPHOTO_THUMB_M.png")
    write_image(animal_folder / "cat" / ".thumbnails" / "0.png")
    (animal_folder / "dog" / "all").symlink_to(animal_folder)
    source = open_folder(animal_folder)
    assert source.num_images("train") + source.num_images("val") == 20
    assert [line.partition(" (")[0] for line in source.skipped] == ["cat/@eaDir"]


def test_folder_source_skips_pixels_without_defined_range(animal_folder: Path) -> None:
    for mode, pixels in (("F", np.float32), ("I", np.int32)):
        Image.fromarray(np.full((30, 40), 90, pixels)).save(animal_folder / "cat" / f"{mode}.tiff")
    # Pillow reads 16 bits of PGM in the mode of 32 bits.
    (animal_folder / "dog" / "16.pgm").write_bytes(b"P5 4 2 65535\n" + bytes(range(16)))
    source = open_folder(animal_folder)
    assert source.num_images("train") + source.num_images("val") == 21
    assert [line.partition(" (")[0] for line in source.skipped] == ["cat/F.tiff", "cat/I.tiff"]
    assert all(says(line, "not-supported", "8 or 16 bits") for line in source.skipped)


def test_folder_source_names_heic(animal_folder: Path) -> None:
    (animal_folder / "cat" / "IMG.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    [skipped] = open_folder(animal_folder).skipped
    assert says(skipped, "not-supported", "cat/IMG.HEIC (", " HEIC, ", " JPEG")


def test_folder_source_names_vanished_image(animal_folder: Path) -> None:
    source = open_folder(animal_folder)
    deleted = animal_folder / source.paths["train"][0]
    deleted.unlink()
    with raises_problem("bad-image", "", deleted, kind=UnreadableImageError):
        source.load("train", np.array([0]))


def test_folder_source_skips_named_pipe(animal_folder: Path) -> None:
    os.mkfifo(animal_folder / "cat" / "pipe.png")
    [skipped] = open_folder(animal_folder).skipped
    assert skipped.startswith("cat/pipe.png (")


def test_folder_source_names_dataset_of_tar_shards(tmp_path: Path) -> None:
    shard = tmp_path / "train-0.tar"
    shard.touch()
    assert is_refused(shard, "not-a-folder", f"{shard} ", "webdataset ")
    assert is_refused(tmp_path, "too-few-classes", f"{tmp_path} ", "data.dataset=webdataset")


@pytest.mark.parametrize("names", [(), ("one",)])
def test_folder_source_rejects_fewer_than_two_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write_image(tmp_path / name / "1.png")
    assert is_refused(tmp_path, "too-few-classes", f"{tmp_path} ", *(f" {name}" for name in names))


def test_error_of_open_file_is_reported_without_its_name() -> None:
    # As of a file on a network file system that was replaced while it was read.
    reason = os.strerror(errno.ESTALE)
    with (
        raises_problem("not-readable", "data.path", f"a file of the dataset cannot be read: {reason}"),
        folder.usage_error_on_os_error(),
    ):
        raise OSError(errno.ESTALE, reason)
