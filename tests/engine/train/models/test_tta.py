"""Test-time augmentation in the evaluation of a run, in `gputrain evaluate` and in predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.config.training_sections import EvalConfig
from engine.runs.folder import RunFolder
from engine.train.inference.trained_model import load_trained_model
from engine.train.models.tta import augmented_logits
from support.runs.in_process import train_in_process
from support.runs.trained_run import call


def test_flip_averages_logits_of_image_and_mirror_image() -> None:
    images, model = torch.rand(4, 3, 8, 8), nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    flipped = augmented_logits(model, images, EvalConfig(tta="flip"))
    torch.testing.assert_close(flipped, (model(images) + model(torch.flip(images, [3]))) / 2)
    assert torch.equal(augmented_logits(model, images, EvalConfig()), model(images))


def test_training_evaluate_and_predict_agree_with_flip(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "flipped")
    [epoch] = train_in_process(run.path, "run.epochs=1", "model.name=linear", "eval.tta=flip")
    run.lock.touch()

    def evaluated(*overrides: str) -> tuple[str, float]:
        done = call("evaluate", run.path, "--gpus", "cpu", "--json", *overrides)
        assert done.exit_code == 0, done.output
        result = json.loads(done.stdout)
        return result["tta"], result["loss"]

    assert evaluated() == ("flip", pytest.approx(epoch.val_loss, rel=1e-6))
    tta, plain_loss = evaluated("eval.tta=none")
    assert tta == "none" and plain_loss != pytest.approx(epoch.val_loss, rel=1e-3)
    trained = load_trained_model(run, device="cpu")
    images = torch.randint(256, (8, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(trained.probabilities(images), trained.probabilities(images.flip(-1)))
