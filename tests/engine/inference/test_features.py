"""`gputrain predict --features`: features of a layer for the images of a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from engine.inference.features import average_positions, folder_labels
from engine.inference.predict import read_image_or_error
from engine.inference.trained_model import load_trained_model
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem
from support.messages import says
from support.runs.trained_run import call, saved_run

DATA = {"dataset": "fake", "num_classes": 5, "image_size": 16}
SMALL = {"name": "resnet18-small", "options": {"width": 2}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return saved_run(tmp_path / "runs" / "a", data=DATA, model=SMALL)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """70 images, more than a batch, in two class folders and beside them."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for index in range(70):
        path = folder / ("cat", "dog", ".")[index % 3] / f"{index:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (20, 24, 3), np.uint8)).save(path)
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "dog" / "cut.png").write_bytes((folder / "cat" / "00.png").read_bytes()[:200])
    return folder


@pytest.mark.parametrize(("options", "pooled"), [([], True), (["--no-pool"], False)])
def test_features_are_outputs_of_the_layer(
    run: RunFolder, photos: Path, tmp_path: Path, options: list[str], pooled: bool
) -> None:
    target = tmp_path / "f.npz"
    arguments = ("-o", target, "--runs-dir", run.path.parent, "--features", "layer2", "--json", *options)
    done = call("predict", "a", photos, *arguments)
    assert done.exit_code == 0, done.output
    assert says(done.stderr, "bad-image", "cut.png") and "notes.txt" in done.stderr
    result = json.loads(done.stdout)
    assert (result["layer"], result["unread"], result["classes"]) == ("layer2", 2, ["cat", "dog"])
    with np.load(target, allow_pickle=False) as stored:
        arrays = dict(stored)
    assert result["shape"] == list(arrays["features"].shape)
    assert arrays["features"].shape == ((70, 4) if pooled else (70, 4, 8, 8))
    names = [Path(path).parts[0] if "/" in path else None for path in arrays["paths"]]
    assert [None if label < 0 else arrays["classes"][label] for label in arrays["labels"]] == names
    model = load_trained_model(run, device="cpu")
    for row in (0, 69):
        image = read_image_or_error(photos / str(arrays["paths"][row]), model.checkpoint.image_format)
        assert not isinstance(image, Problem)
        out = model.prepare(torch.from_numpy(image.copy()[None]))
        for part in ("conv1", "bn1", "relu", "layer1", "layer2"):
            out = model.model.get_submodule(part)(out)
        expected = out.mean((2, 3)) if pooled else out
        np.testing.assert_allclose(arrays["features"][row], expected[0].numpy(), rtol=1e-4, atol=1e-5)


def test_features_default_to_last_stage_and_keep_existing_file(run: RunFolder, photos: Path, tmp_path: Path) -> None:
    target = tmp_path / "f.npz"
    arguments = ("predict", "a", photos, "--features", "auto", "-o", target, "--runs-dir", run.path.parent)
    done = call(*arguments)
    assert done.stdout.startswith(f"{target}: 70 images, 16 features each of layer layer4, 2 class folders")
    before = target.read_bytes()
    refused = call(*arguments)
    assert refused.exit_code == 2 and says(refused.stderr, "name-in-use", target, "--force")
    assert call(*arguments, "--force").exit_code == 0
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.npz", "photos", "runs"]


def test_features_rejects_unknown_layer_and_folder_without_images(run: RunFolder, photos: Path, tmp_path: Path) -> None:
    target, runs = tmp_path / "f.npz", run.path.parent
    refused = call("predict", "a", photos, "-o", target, "--runs-dir", runs, "--features", "layer5")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --features: resnet18-small ")
    assert says(refused.stderr, "not-found", "'layer5'", "layer1", "`gputrain models show`")
    shutil.rmtree(photos)
    photos.mkdir()
    refused = call("predict", "a", photos, "--features", "auto", "-o", target, "--runs-dir", runs)
    assert refused.exit_code == 2 and says(refused.stderr, "no-images", "PATH")
    assert not target.exists()


def test_features_that_do_not_fit_on_disk_are_refused(
    run: RunFolder, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.inference.features.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    options = ("--features", "auto", "-o", tmp_path / "f.npz", "--runs-dir", run.path.parent, "--no-pool")
    refused = call("predict", "a", photos, *options)
    assert refused.exit_code == 2 and says(refused.stderr, "disk-full", tmp_path / "f.npz", "--no-pool", "--output")
    assert not (tmp_path / "f.npz").exists()


def test_average_positions_knows_layouts() -> None:
    channels_first, channels_last = torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4, 3)
    assert torch.equal(average_positions(channels_first), channels_first.mean((2, 3)))
    assert torch.equal(average_positions(channels_last), channels_last.mean((1, 2)))
    assert average_positions(torch.rand(2, 7, 5)).shape == average_positions(torch.rand(2, 5)).shape == (2, 5)


def test_folder_labels_skips_folders_of_parts() -> None:
    assert folder_labels([Path("train/a/1"), Path("val/b/2")]) == ([0, 1], ["a", "b"])
    assert folder_labels([Path("b/x/1"), Path("a/2"), Path("3")]) == ([1, 0, -1], ["a", "b"])
