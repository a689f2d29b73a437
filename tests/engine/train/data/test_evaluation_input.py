"""Both input pipelines give evaluation the images that `read_image` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config.loader import resolve_config
from engine.train.data.device import InputPipeline
from engine.train.data.plan import InputPlan
from engine.train.data.sampler import BatchRequest
from engine.train.data.sources.folder import FolderSource
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.image import read_image
from engine.train.data.sources.open import open_source
from support.models.sample_images import write_sample_images

NORMALIZED = ["data.mean=[0,0,0]", "data.std=[1,1,1]"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("pipeline", ["memory", "stream"])
@pytest.mark.parametrize(
    "overrides",
    [[], ["data.val_resize=20"], ["data.val_crop=24", "data.interpolation=bicubic"], ["data.fit=squash"]],
)
def test_evaluation_input_is_that_of_read_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, overrides: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        samples = list(write_sample_images(tmp_path / "photos" / folder))
    data = ["data.dataset=folder", f"data.path={tmp_path / 'photos'}", "data.image_size=16", *NORMALIZED]
    config = resolve_config(None, [*data, *overrides]).config
    source = open_source(config)
    assert isinstance(source, FolderSource)
    image_format = model_input_format(config, source)
    requests = [BatchRequest("train", 1, np.arange(10)), BatchRequest("val", 0, np.arange(2 * len(samples)))]
    choice = InputPlan("memory" if pipeline == "memory" else "stream", "")
    batches = InputPipeline(choice, source, config, image_format, requests).device_loader(CPU)
    train, val = (next(batches).images.mul(255).round().numpy() for _ in requests)
    expected = [read_image(Path(source.root, path), image_format) for path in source.paths["val"]]
    assert (val == np.stack(expected)).all()
    assert train.shape == (10, 3, 16, 16)
