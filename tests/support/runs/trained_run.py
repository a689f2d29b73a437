"""Create run folders with a checkpoint but without training, and call commands in the test process."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner, Result

from engine.config.loader import validate_config
from engine.config.schema import as_dict
from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.runs.folder import RunFolder
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.loop.checkpoint import save_checkpoint
from engine.train.models.factory import build_model
from tui.cli.main import app

DIGITS = validate_config({})


def call(*arguments: object) -> Result:
    """Call the CLI in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def saved_run(folder: Path, state: dict[str, Any] | None = None, seed: int = 0, **config: Any) -> RunFolder:
    """Create a run with only a checkpoint. Its model has the random weights of `seed`, unless `state` has others."""
    resolved = validate_config(
        {"data": {"dataset": "fake", "num_classes": 5, "image_size": 8}, "model": {"name": "linear"}} | config
    )
    input_format = model_input_format(resolved, open_source(resolved))
    classes = open_source(resolved).classes
    checkpoint: dict[str, Any] = dict.fromkeys(CHECKPOINT_KEYS)
    checkpoint |= {"step": 7, "best_epoch": 1, "best_accuracy": 0.5, "image_format": asdict(input_format)}
    checkpoint |= {"config": as_dict(resolved), "classes": list(classes)}
    with torch.random.fork_rng(devices=[]):
        # With some weights, the two best classes of an image are almost equally likely.
        torch.manual_seed(seed)
        model = build_model(resolved, input_format.channels, len(classes), input_format.size)
    checkpoint["model"] = model.state_dict()
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.lock.touch()
    save_checkpoint(checkpoint | (state or {}), run.checkpoints, best=True, keep=1)
    return run
