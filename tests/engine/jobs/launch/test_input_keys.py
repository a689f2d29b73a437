"""The input keys that pretrained weights, or the run to resume, supply before the dataset is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from engine.base.codec import write_user_record
from engine.base.errors import Problem
from engine.base.files import cache_folder
from engine.base.libraries import installed_version
from engine.config.code_trust import CodeTrust
from engine.config.loader import resolve_config
from engine.jobs.launch import preflight as input_keys
from engine.jobs.launch.preflight import with_input_keys
from engine.jobs.launch.request import RunRequest
from engine.train.data.sources.base import ItemFormat
from engine.train.models.catalog import ModelListing, PretrainedInput

PRETRAINED = ("model.name=resnet50", "model.source=torchvision", "model.weights=pretrained")
WEIGHTS = PretrainedInput(
    weights="W",
    image_size=224,
    val_crop=224,
    val_resize=232,
    crop_ratio=224 / 232,
    fit="crop",
    interpolation="bicubic",
    mean=(0.4, 0.5, 0.6),
    std=(0.1, 0.2, 0.3),
)
USER_DATASET = """
from PIL import Image

def photos(part):
    return [(Image.new("L", (WIDTH, 20)), 0)] * 4
"""


@pytest.fixture(autouse=True)
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"models-torchvision-{installed_version('torchvision')}.json"
    write_user_record(cache_folder(), name, ModelListing(models=(), inputs={"resnet50": WEIGHTS}))


def request(runs: Path, *overrides: str) -> RunRequest:
    config = resolve_config(None, [*PRETRAINED, *overrides]).config
    return RunRequest(config, runs, "run")


def folder_request(runs: Path, *overrides: str) -> RunRequest:
    return request(runs, "data.dataset=folder", "data.path=/photos", *overrides)


def test_new_run_takes_input_of_its_weights(tmp_path: Path) -> None:
    filled = with_input_keys(folder_request(tmp_path))
    data = filled.config.data
    assert (data.image_size, data.val_crop, data.val_resize, data.interpolation) == (224, 224, 232, "bicubic")
    assert (data.mean, data.std) == (WEIGHTS.mean, WEIGHTS.std)
    assert filled.input_source == "mean/std of W"
    assert with_input_keys(filled) == filled


def test_resumed_run_keeps_input_of_its_first_session(tmp_path: Path) -> None:
    run = tmp_path / "older"
    run.mkdir()
    stored = {"dataset": "folder", "path": "/photos", "val_resize": 240, "mean": [0.1, 0.1, 0.1]}
    model = {"name": "resnet50", "source": "torchvision", "weights": "pretrained"}
    (run / "config.yaml").write_text(yaml.safe_dump({"data": stored, "model": model}))
    resumed = with_input_keys(folder_request(tmp_path, "run.resume=true", "run.name=older", "data.std=[0.2,0.2,0.2]"))
    data = resumed.config.data
    # As stored, also where the version that wrote it did not know the key.
    assert (data.val_resize, data.mean, data.std) == (240, (0.1, 0.1, 0.1), (0.2, 0.2, 0.2))
    assert (data.image_size, data.val_crop, data.fit, data.interpolation) == (None, None, None, None)
    # Else the preflight would refuse a default that small data does not fill.
    assert "batch_size" not in data.model_fields_set
    assert resumed.input_source == ""


@pytest.mark.parametrize(
    ("stored", "typed", "kept"),
    [
        ("bf16", ["precision.amp=auto"], "bf16"),
        ("off", ["precision.amp=auto"], "off"),
        ("bf16", ["precision.amp=fp16"], "fp16"),
        # DataParallel does not support bf16.
        ("bf16", ["precision.amp=auto", "device.parallel=dp"], "auto"),
    ],
)
def test_resumed_run_keeps_precision_that_auto_chose(tmp_path: Path, stored: str, typed: list[str], kept: str) -> None:
    run = tmp_path / "older"
    run.mkdir()
    values = {"data": {"dataset": "digits"}, "precision": {"amp": stored}}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    resumed = with_input_keys(folder_request(tmp_path, "run.resume=true", "run.name=older", *typed))
    assert resumed.config.precision.amp == kept


@pytest.mark.parametrize(("width", "items"), [(20, ItemFormat(20, 1)), (30, ItemFormat(None, 1))])
def test_user_dataset_of_square_items_keeps_their_size(tmp_path: Path, width: int, items: ItemFormat) -> None:
    (tmp_path / "own_photos.py").write_text(USER_DATASET.replace("WIDTH", str(width)))
    filled = with_input_keys(request(tmp_path, "data.dataset=own_photos:photos", f"run.code={tmp_path}"))
    data = filled.config.data
    assert (data.image_size, data.val_resize) == ((224, 232) if items.size is None else (None, None))
    assert data.mean == pytest.approx((0.5,))


def test_foreign_code_and_invalid_requests_run_no_user_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise AssertionError("the dataset was opened")

    monkeypatch.setattr(input_keys, "find_item_format", refuse)
    own = request(tmp_path, "data.dataset=own_photos:photos", f"run.code={tmp_path}")
    trust = CodeTrust(foreign={"data.dataset": "it is somebody else's"})
    assert with_input_keys(replace(own, code_trust=trust)).config == own.config
    problem = Problem("optim.lr", "is invalid", code="invalid-value")
    assert with_input_keys(replace(own, problems=(problem,))).config.data.image_size == 224


def test_missing_library_leaves_keys_unset_for_preflight_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.base.libraries.installed_version", lambda _: None)
    unfilled = folder_request(tmp_path)
    assert with_input_keys(unfilled) == unfilled
