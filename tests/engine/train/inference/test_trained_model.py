"""Choice of the checkpoint of a trained run, and of the model and device for inference."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.runs.folder import RunFolder
from engine.train.inference.trained_model import (
    config_from_checkpoint,
    load_trained_model,
    read_trained_checkpoint,
)
from engine.train.loop.checkpoint import load_checkpoint, save_checkpoint
from support.messages import raises_problem
from support.runs.trained_run import saved_run


def test_read_checkpoint_prefers_best_then_last(run: RunFolder) -> None:
    assert read_trained_checkpoint(run).path.name == "best.pt"
    assert read_trained_checkpoint(run, "last").path.name == "last.pt"
    (run.checkpoints / "best.pt").unlink()
    assert read_trained_checkpoint(run).path.name == "last.pt"
    file = next(run.checkpoints.glob("step-*.pt"))
    assert read_trained_checkpoint(run, str(file)).path == file


def test_read_checkpoint_reports_damaged_file_in_one_sentence(run: RunFolder) -> None:
    best = run.checkpoints / "best.pt"
    content = best.read_bytes()
    best.unlink()
    best.write_bytes(content[:-100])
    with raises_problem("damaged", str(best), "--checkpoint last"):
        read_trained_checkpoint(run)


def save_changed(run: RunFolder, **changes: Any) -> Path:
    """Save a copy of the best checkpoint with other content and a valid checksum; return its path."""
    state = load_checkpoint(run.checkpoints / "best.pt") | changes
    del state["format"]
    return save_checkpoint(state, run.path / "changed", best=False, keep=1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", 5),
        ("config", [1]),
        ("config", {"model": 3}),
        ("image_format", None),
        ("image_format", {"size": 0, "channels": 1, "mean": [0.5], "std": [0.5]}),
        ("image_format", {"size": 10**9, "channels": 1, "mean": [0.5], "std": [0.5]}),
        ("image_format", {"size": 8, "channels": 3, "mean": [0.5], "std": [0.5]}),
        ("image_format", {"size": 8, "channels": 1, "mean": [0.5], "std": [0.5], "epoch_sizes": [["8", None]]}),
        ("image_format", {"size": 8, "channels": 1, "mean": [math.nan], "std": [0.5]}),
        ("image_format", {"size": 8, "channels": 1, "mean": [0.5], "std": [math.inf]}),
        ("image_format", {"size": 8, "channels": 1, "mean": [0.5], "std": [0.0]}),
        ("model", [1]),
    ],
)
def test_read_checkpoint_reports_malformed_content(run: RunFolder, key: str, value: Any) -> None:
    changed = save_changed(run, **{key: value})
    with raises_problem("damaged", str(changed), key):
        read_trained_checkpoint(run, str(changed))


def test_config_from_checkpoint_ignores_removed_keys() -> None:
    values = as_dict(validate_config({"model": {"name": "linear"}}))
    values["model"]["of_old"] = 3
    values["gone"] = {"key": 1}
    assert config_from_checkpoint(values).model.name == "linear"


def test_load_trained_uses_ema_unless_raw(tmp_path: Path) -> None:
    weights = read_trained_checkpoint(saved_run(tmp_path / "a")).weights
    averaged = {name: value + 1 for name, value in weights.items()}
    run = saved_run(tmp_path / "b", {"model": weights, "ema": averaged})
    for raw, expected in ((False, averaged), (True, weights)):
        trained = load_trained_model(run, device="cpu", raw=raw)
        assert trained.checkpoint.ema is not raw
        assert all(torch.equal(value, expected[name]) for name, value in trained.model.state_dict().items())


def test_load_trained_converts_half_weights_and_freezes_model(tmp_path: Path) -> None:
    weights = read_trained_checkpoint(saved_run(tmp_path / "a")).weights
    trained = load_trained_model(
        saved_run(tmp_path / "b", {"model": {name: value.half() for name, value in weights.items()}})
    )
    assert {value.dtype for value in trained.model.parameters()} == {torch.float32}
    assert not trained.model.training
    assert not any(value.requires_grad for value in trained.model.parameters())


def test_load_trained_rejects_weights_of_another_model(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "a", {"model": {"weight": torch.zeros(1)}})
    difference = 'Missing key(s) in state_dict: "1.weight", "1.bias"'
    with raises_problem("conflict", str(run.checkpoints / "best.pt"), "linear", difference):
        load_trained_model(run)


def test_read_checkpoint_reports_run_without_checkpoint(tmp_path: Path) -> None:
    with raises_problem("no-checkpoint", tmp_path.name):
        read_trained_checkpoint(RunFolder(tmp_path))
    RunFolder(tmp_path).command.touch()
    with raises_problem("no-checkpoint", tmp_path.name, "is the run of a command"):
        read_trained_checkpoint(RunFolder(tmp_path))
