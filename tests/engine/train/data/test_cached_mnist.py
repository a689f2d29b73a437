"""MNIST in the cache of decoded images: its size, damaged labels, an unusable cache, and no torchvision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.config.loader import resolve_config
from engine.train.data.sources.open import open_source
from support.data.device_batches import assert_the_same, batches
from support.data.mnist_files import write_mnist
from support.data.photo_folder import AUGMENT_OVERRIDES

pytestmark = pytest.mark.usefixtures("cache")


FIRST_BATCH_PROGRAM = """
import sys, torch
from engine.train.loop import train
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.checks import build_sampler
from engine.train.data.device import InputPipeline
from engine.train.data.decoded import load_in_memory
from engine.train.data.plan import choose_pipeline
from engine.config.loader import resolve_config

config = resolve_config(None, ["data.dataset=mnist", "data.path=" + sys.argv[1], *sys.argv[2:]]).config
source = open_source(config)
choice = choose_pipeline(config, source, 1)
requests = build_sampler(config, source, 1).requests(1)
pipeline = InputPipeline(choice, source, config, model_input_format(config, source), requests)
images = next(pipeline.device_loader(torch.device("cpu"))).images
print(choice.pipeline, tuple(images.shape), "torchvision" in sys.modules)
"""


@pytest.mark.nightly
def test_mnist_from_cache_does_not_import_torchvision(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    source = open_source(resolve_config(None, ["data.dataset=mnist", f"data.path={tmp_path}"]).config)
    assert (source.num_images("train"), source.num_images("val"), len(source.classes)) == (96, 40, 10)
    outputs = [
        subprocess.run(
            [
                sys.executable,
                "-c",
                FIRST_BATCH_PROGRAM,
                str(tmp_path),
                "augment.erasing=0.5",
                "augment.flip=true",
                *overrides,
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for overrides in (["data.image_size=32", "data.channels=3"],)
    ]
    assert outputs == ["memory (64, 3, 32, 32) False\n"]


def test_mnist_is_cached_at_requested_size(tmp_path: Path, cache: Path) -> None:
    write_mnist(tmp_path)
    overrides = [
        "data.dataset=mnist",
        f"data.path={tmp_path}",
        "data.image_size=20",
        "data.channels=3",
        *AUGMENT_OVERRIDES,
    ]
    config = resolve_config(None, overrides).config
    loaded = batches("memory", config, open_source(config))
    assert_the_same(loaded, batches("stream", config, open_source(config)))
    assert sorted(np.load(path).shape for path in cache.glob("*.npy")) == [
        (40, 3, 20, 20),
        (96, 3, 20, 20),
        (136, 1, 28, 28),
    ]
