"""`gputrain data`: classes, image files, and the images as the network sees them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.train import dataset_view as dataset
from engine.train.dataset_view import GAP, LABEL_COLUMN
from support.data.photo_folder import write_photo_folder
from support.messages import says
from support.runs.trained_run import call


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    photos = write_photo_folder(tmp_path / "photos")
    (photos / "cat" / "7.png").write_bytes(b"not an image")
    return photos


def options(photos: Path) -> list[str]:
    return ["data.dataset=folder", f"data.path={photos}", "data.image_size=16"]


def test_data_counts_images_per_class_and_lists_skipped_files(photos: Path) -> None:
    done = call("data", *options(photos))
    assert done.exit_code == 0, done.output
    rows = [line.split()[:3] for line in done.stdout.splitlines()]
    assert [row for row in rows if row[:1] in (["cat"], ["dog"], ["all"])] == [
        ["cat", "6", "1"],
        ["dog", "6", "2"],
        ["all", "12", "3"],
    ]
    assert "image files  24 x 20" in done.stdout.splitlines()
    assert "cat/7.png (not an image)" in done.stdout


def test_data_warns_of_images_below_half_of_default_input(photos: Path) -> None:
    done = call("data", *options(photos)[:2], "--json")
    assert json.loads(done.stdout)["input"]["size"] == 224
    assert says(done.stderr, "images-enlarged", "20 x 20", "data.image_size=20")
    assert call("data", *options(photos)).stderr == ""


def test_data_writes_images_as_network_sees_them(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MIN_TILE", 16)
    sheets = {}
    for name, extra in {"plain": [], "flipped": ["--augmented", "augment.flip=true"]}.items():
        path = tmp_path / "sheet.png"
        done = call("data", *options(photos), "-o", path, "--force", *extra)
        assert done.exit_code == 0, done.output
        sheets[name] = np.asarray(Image.open(path))
    assert sheets["plain"].shape == (2 * (16 + GAP) + GAP, LABEL_COLUMN + 6 * (16 + GAP), 3)
    tiles = {
        name: [sheet[GAP : GAP + 16, LABEL_COLUMN + 20 * column :][:, :16] for column in range(6)]
        for name, sheet in sheets.items()
    }
    pairs = list(zip(tiles["plain"], tiles["flipped"], strict=True))
    same = [np.array_equal(plain, shown) for plain, shown in pairs]
    mirrored = [np.array_equal(plain[:, ::-1], shown) for plain, shown in pairs]
    assert all(a or b for a, b in zip(same, mirrored, strict=True))
    assert any(mirrored)


def test_data_overwrites_no_file_without_force(photos: Path) -> None:
    photo = photos / "cat" / "7.png"
    done = call("data", *options(photos), "-o", photo)
    assert (done.exit_code, photo.read_bytes()) == (2, b"not an image")
    assert says(done.stderr, "name-in-use", "error: --output: ", photo, "--force")


def test_data_imports_transform_only_to_augment(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "my_transform.py").write_text("raise RuntimeError('imported')\n")
    own = [f"run.code={tmp_path}", "augment.transform=my_transform:change", "-o", str(tmp_path / "sheet.png")]
    plain = call("data", *options(photos), *own)
    assert plain.exit_code == 0, plain.output
    augmented = call("data", *options(photos), *own, "--augmented", "--force")
    assert augmented.exit_code == 2 and "imported" in augmented.stderr


@pytest.mark.parametrize(
    ("header", "labels", "task", "expected", "sheet_rows"),
    [
        ("tags", ("red;old", "old"), "multilabel", [["old", "8", "2"], ["red", "4", "1"]], 2),
        ("weight", ("0.5", "4"), "regression", [["weight", "8", "2", "min", "0.5,"]], 1),
    ],
)
def test_data_describes_labels_and_numbers_of_a_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: str,
    labels: tuple[str, str],
    task: str,
    expected: list[list[str]],
    sheet_rows: int,
) -> None:
    monkeypatch.setattr(dataset, "MIN_TILE", 16)
    for number in range(10):
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{labels[number % 2]},{'val' if number > 7 else 'train'}" for number in range(10)]
    (tmp_path / "labels.csv").write_text("\n".join([f"image,{header},split", *lines]))
    command = ("data", tmp_path / "labels.csv", "--task", task, "--image-size", 16)
    done = call(*command, "-o", tmp_path / "sheet.png")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[: len(wanted)] for row, wanted in zip(rows[1:], expected, strict=False)] == expected
    assert ["all", "8", "2"] in rows
    assert Image.open(tmp_path / "sheet.png").height == sheet_rows * (16 + GAP) + GAP
    assert json.loads(call(*command, "--json").stdout)["images"] == {"train": 8, "val": 2}
