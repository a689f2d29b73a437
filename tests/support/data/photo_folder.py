"""Write a small image folder, and open it with augmentation enabled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.open import open_source

AUGMENT_OVERRIDES = ["augment.crop_padding=2", "augment.flip=true", "augment.erasing=0.5", "data.batch_size=16"]


def write_photo_folder(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def open_photo_folder(photos: Path, *overrides: str) -> tuple[Config, ImageSource]:
    data = ["data.dataset=folder", f"data.path={photos}", "data.image_size=16", "data.batch_size=4"]
    config = resolve_config(None, [*data, *AUGMENT_OVERRIDES[:3], *overrides]).config
    return config, open_source(config)
