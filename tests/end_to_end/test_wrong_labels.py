"""Wrong labels that are planted in a folder of photos are found after training on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.data.planted_labels import write_photos_with_wrong_labels
from support.gputrain_command import Gputrain


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_evaluate_finds_planted_wrong_labels(gputrain: Gputrain, tmp_path: Path, seed: int) -> None:
    """The model is good but not perfect, and has trained on most of the wrong labels itself."""
    photos = tmp_path / "photos"
    planted = write_photos_with_wrong_labels(photos, seed)
    data = ["--dataset", "folder", "--data-path", str(photos), "data.image_size=32", "data.val_split=0.2"]
    recipe = ["--model", "cnn", "--epochs", "12", "--lr", "0.002", "--optimizer", "adamw", "--batch-size", "40"]
    augment = ["augment.flip=true", "augment.crop_padding=2", "--seed", str(seed)]
    done = gputrain("run", "--headless", "--gpus", "cpu", "--name", "photos", *data, *recipe, *augment)
    assert done.returncode == 0, done.stderr
    listed = gputrain("evaluate", "photos", "--split", "all", "--list", "label-issues", "-n", "40", "--json")
    assert listed.returncode == 0, listed.stderr
    values = json.loads(listed.stdout)
    found = {"/".join(Path(image["path"]).parts[-2:]) for image in values["lists"]["label-issues"]} & planted
    print(f"seed {seed}: {len(found)} of {len(planted)} found, {values['wrong']} of {values['images']} images wrong")
    assert values["images"] == 1000 and values["wrong"] > len(planted)
    assert len(found) >= 16
