"""Pictures of inspected images."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.runs.folder import RunFolder
from engine.runs.inspection import Inspection
from engine.train.data.sources.base import UnreadableImageError
from engine.train.inference.preview import load_preview
from support.messages import raises_problem
from support.runs.inspections import make_inspection


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir(mode=0o755)
    return RunFolder(tmp_path / "run")


def inspection_of(root: Path, *paths: str) -> Inspection:
    table = [[0.2, 0.8, 0.0]] * len(paths)
    return make_inspection(table, [0] * len(paths), paths=paths, info={"root": str(root)})


def test_preview_of_image_file_is_upright_and_on_white(tmp_path: Path, run: RunFolder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20), "red").save(tmp_path / "turned.jpg", exif=exif)
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.fromarray(np.full((4, 4), 65535, np.uint16)).save(tmp_path / "deep.png")
    Image.new("L", (4000, 1000)).save(tmp_path / "large.png")
    Image.new("RGB", (4, 2), "red").save(tmp_path / "plain.png")
    images = inspection_of(tmp_path, "turned.jpg", "clear.png", "deep.png", "large.png", "plain.png")
    turned, clear, deep, large, plain = (load_preview(run, images, image) for image in images.images(range(5)))
    assert (plain.size, plain.mode, plain.getpixel((3, 1))) == ((4, 2), "RGB", (255, 0, 0))
    assert (turned.size, turned.mode) == ((20, 40), "RGB")
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    assert (deep.mode, deep.getpixel((0, 0))) == ("L", 255)
    assert large.size == (1024, 256)


def test_preview_of_array_dataset_is_its_thumbnail(run: RunFolder) -> None:
    pictures = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    images = make_inspection(
        [[0.2, 0.8, 0.0]] * 2, [0, 0], thumbnail_rows=np.array([1]), thumbnails=pictures, info={"root": None}
    )
    assert np.array_equal(np.asarray(load_preview(run, images, images.image(1))), pictures[0, :, :, 0])
    with raises_problem("not-recorded", "", "val 0", kind=UnreadableImageError):
        load_preview(run, images, images.image(0))


def test_preview_names_file_that_cannot_be_shown(tmp_path: Path, run: RunFolder) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    images = inspection_of(tmp_path, "notes.txt", "gone.png")
    with raises_problem("bad-image", "", tmp_path / "notes.txt", kind=UnreadableImageError):
        load_preview(run, images, images.image(0))
    with raises_problem("bad-image", "", tmp_path / "gone.png", "No such file", kind=UnreadableImageError):
        load_preview(run, images, images.image(1))


def test_preview_follows_links_only_in_own_run(tmp_path: Path, run: RunFolder) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "secret.png")
    Image.new("L", (4, 4)).save(photos / "plain.png")
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    (photos / "up").symlink_to(tmp_path)
    os.mkfifo(photos / "pipe.png")
    images = inspection_of(photos, "plain.png", "link.png", "../secret.png", "up/secret.png", "pipe.png")
    for row in range(4):
        assert load_preview(run, images, images.image(row)).size == (4, 4)
    run.path.chmod(0o777)
    assert load_preview(run, images, images.image(0)).size == (4, 4)
    for row in (1, 2, 3, 4):
        with raises_problem("bad-image", "", images.image(row).path, kind=UnreadableImageError):
            load_preview(run, images, images.image(row))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another user")
def test_preview_of_foreign_run_shows_no_private_file_of_others(tmp_path: Path, run: RunFolder) -> None:
    photo = tmp_path / "photo.png"
    Image.new("L", (4, 4)).save(photo)
    images = inspection_of(tmp_path, "photo.png")
    os.chown(run.path, 12345, 12345)
    for folder_mode, mode in ((0o755, 0o600), (0o700, 0o644)):
        tmp_path.chmod(folder_mode)
        photo.chmod(mode)
        with raises_problem("bad-image", "", photo, "private", kind=UnreadableImageError):
            load_preview(run, images, images.image(0))
    os.chown(photo, 12345, 12345)
    assert load_preview(run, images, images.image(0)).size == (4, 4)
