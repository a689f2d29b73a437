"""The fingerprint of a dataset changes with its images, and not with its folder."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.data.fingerprint import Fingerprint
from engine.data.sampler import PARTS
from engine.data.sources.open import open_source
from support.data.photo_folder import open_photo_folder, write_photo_folder


def fingerprints(photos: Path, *overrides: str) -> list[Fingerprint]:
    _, source = open_photo_folder(photos, *overrides)
    return [source.fingerprint(part) for part in PARTS]


def changed(before: list[Fingerprint], after: list[Fingerprint]) -> set[str]:
    """Return the properties that differ in either part."""
    pairs = list(zip(before, after, strict=True))
    names = (field.name for field in fields(Fingerprint))
    return {name for name in names if any(getattr(one, name) != getattr(other, name) for one, other in pairs)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photo_folder(tmp_path / "photos")


def test_folder_fingerprint_is_complete_and_differs_between_parts(photos: Path) -> None:
    train, val = fingerprints(photos)
    assert "" not in (train.names, train.labels, train.sizes)
    assert changed([train], [val]) == {"names", "labels", "sizes"}


def test_folder_fingerprint_is_the_same_in_another_folder(photos: Path) -> None:
    before = fingerprints(photos)
    moved = shutil.copytree(photos, photos.parent / "elsewhere" / "moved")
    assert fingerprints(moved) == before


def test_folder_fingerprint_changes_with_renamed_file(photos: Path) -> None:
    before = fingerprints(photos)
    # In the same place of the order.
    (photos / "cat" / "7.png").rename(photos / "cat" / "8.png")
    assert changed(before, fingerprints(photos)) == {"names"}


def test_folder_fingerprint_changes_with_file_size(photos: Path) -> None:
    before = fingerprints(photos)
    with (photos / "dog" / "0.png").open("ab") as file:
        file.write(b"trailing bytes")
    assert changed(before, fingerprints(photos)) == {"sizes"}


def test_folder_fingerprint_changes_with_split(photos: Path) -> None:
    before = fingerprints(photos)
    assert "names" in changed(before, fingerprints(photos, "run.seed=5"))
    assert "names" in changed(before, fingerprints(photos, "data.val_split=0.5"))


def test_digits_fingerprint_changes_with_split() -> None:
    one, same, other = (open_source(resolve_config("digits", [f"run.seed={seed}"]).config) for seed in (0, 0, 5))
    assert one.fingerprint("train") == same.fingerprint("train")
    assert one.fingerprint("train").labels != other.fingerprint("train").labels


def test_fake_fingerprint_does_not_enumerate_images() -> None:
    config = resolve_config(None, ["data.dataset=fake", f"data.fake_train={10**9}"]).config
    assert open_source(config).fingerprint("train") == Fingerprint()


def test_user_dataset_fingerprint_reads_no_items(tmp_path: Path) -> None:
    (tmp_path / "listed.py").write_text(
        "from PIL import Image\n\n\nclass Data:\n    classes = ['a', 'b']\n\n    def __init__(self, part):\n"
        "        pass\n\n    def __len__(self):\n        return 4\n\n    def __getitem__(self, index):\n"
        "        assert index == 0, 'only the first item is read, to find the image size'\n"
        "        return Image.new('L', (8, 8)), 0\n\n\nclass Listed(Data):\n    targets = [0, 1, 0, 1]\n"
    )
    user_code = [f"run.code={tmp_path}", "data.dataset=listed:"]
    listed, unlisted = (
        open_source(resolve_config(None, [user_code[0], user_code[1] + name]).config) for name in ("Listed", "Data")
    )
    assert unlisted.fingerprint("train") == Fingerprint()
    assert listed.fingerprint("train").labels != ""
    assert listed.fingerprint("train").names == ""
