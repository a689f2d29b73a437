"""The fingerprint of a dataset changes with its images, and not with its folder."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from engine.train.data.sampler import PARTS
from engine.train.data.sources.base import Fingerprint
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
