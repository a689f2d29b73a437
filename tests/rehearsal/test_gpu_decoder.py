"""Runs whose JPEG files nvJPEG decodes. The fake one has the pixels of libjpeg-turbo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fake_cuda import Rehearsal, losses_of, run_started

pytestmark = pytest.mark.skipif(find_spec("torchcodec") is None, reason="needs torchcodec")

OPTIONS = (
    *("--dataset", "folder", "--data-path", "photos", "--model", "linear", "--batch-size", "4", "--epochs", "2"),
    *("--workers", "2", "--gpus", "free:2", "data.image_size=32", "augment.resized_crop=true", "augment.flip=true"),
    *("run.log_every=1", "data.val_resize=36"),
)


@pytest.fixture
def photos(rehearsal: Rehearsal) -> Path:
    """48 photos of two classes, every eighth of them a PNG."""
    for number in range(48):
        blocks = np.random.default_rng(number).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        path = (
            rehearsal.folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.{'png' if number % 8 == 7 else 'jpg'}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(blocks).resize((50, 40), Image.Resampling.BICUBIC).save(path)
    return rehearsal.folder / "photos"


@pytest.mark.rehearsal
@pytest.mark.parametrize("loading", [(), ("data.worker_type=processes",), ("--workers", "0")])
def test_gpu_decoder_trains_as_cpu_decoder(rehearsal: Rehearsal, photos: Path, loading: tuple[str, ...]) -> None:
    gpu, cpu = (rehearsal.run(decoder, *OPTIONS, f"data.decoder={decoder}", *loading) for decoder in ("gpu", "cpu"))
    assert run_started(gpu)["decoder"] == "gpu"
    assert run_started(gpu)["decoder_why"] == "set by data.decoder"
    assert losses_of(gpu) == pytest.approx(losses_of(cpu), rel=5e-3)
