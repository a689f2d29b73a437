"""Images of digits whose labels or numbers are in a CSV file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from engine.config.loader import resolve_config
from engine.train.data.sources.open import open_source


def _write_digits(folder: Path, label_of: Callable[[int], str]) -> tuple[str, ...]:
    source = open_source(resolve_config("digits").config)
    lines = ["image,label,split"]
    for part, split, count in (("train", "train", 256), ("val", "valid", 64)):
        images, labels = source.images[part][:count], source.labels[part][:count]
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            name = f"{split}-{number}.png"
            Image.fromarray(image[0]).save(folder / name)
            lines.append(f"{name},{label_of(label)},{split}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return "data.dataset=csv", f"data.path={folder / 'labels.csv'}", "data.image_size=8", "data.channels=1"


@pytest.fixture
def labels_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Whether a digit is odd and whether it is small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return _write_digits(tmp_path, lambda digit: ";".join(["odd"] * (digit % 2) + ["small"] * (digit < 5)))


@pytest.fixture
def numbers_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A hundred times the digit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return _write_digits(tmp_path, lambda digit: str(100 * digit))
