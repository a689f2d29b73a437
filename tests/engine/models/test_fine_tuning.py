"""Fine-tuning: a frozen backbone with the weights of other classes learns faster than a new network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Config
from engine.data.sources.open import open_source
from engine.models.factory import build_model
from engine.models.freeze import freeze, set_train_mode
from engine.models.transfer import load_weights
from engine.optim.optimizers import build_optimizer
from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.training.checkpoint import save_checkpoint

FIRST, SECOND = range(5), range(5, 10)
Part = tuple[Tensor, Tensor]


def digits_of(classes: range, part: Any) -> Part:
    """Normalized images and labels of some digit classes, relabeled from 0."""
    source = open_source(Config())
    labels = source.get_labels(part)
    chosen = [index for index, label in enumerate(labels) if label in classes]
    images, labels = source.load(part, torch.tensor(chosen).numpy())
    (mean,), (std,) = source.format.mean, source.format.std
    return (torch.from_numpy(images) / 255 - mean) / std, torch.from_numpy(labels) - classes.start


def train(model: nn.Module, run: Config, part: Part, epochs: int) -> None:
    """Train on one rank like a run does."""
    images, labels = part
    frozen = freeze(model, run.model)
    optimizer = build_optimizer(run.optim, model)
    for _ in range(epochs):
        set_train_mode(model, frozen)
        for batch in torch.randperm(len(labels)).split(64)[:-1]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def accuracy(model: nn.Module, part: Part) -> float:
    with torch.no_grad():
        return (model.eval()(part[0]).argmax(1) == part[1]).double().mean().item()


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Use one torch thread: for networks this small, more threads only add synchronization."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.nightly
def test_load_weights_with_frozen_backbone_beats_training_from_scratch(tmp_path: Path, single_thread: None) -> None:
    first, second, held_out = (
        digits_of(classes, part) for classes, part in ((FIRST, "train"), (SECOND, "train"), (SECOND, "val"))
    )
    run = Config.model_validate({"model": {"name": "cnn"}, "optim": {"lr": 0.1}})
    gains = []
    for seed in range(3):
        torch.manual_seed(seed)
        source = build_model(run, 1, 5, 8)
        train(source, run, first, 5)
        saved = {"step": 1, "model": source.state_dict(), "classes": [str(digit) for digit in FIRST]}
        path = save_checkpoint(dict.fromkeys(CHECKPOINT_KEYS) | saved, tmp_path, best=False, keep=1)
        scratch = build_model(run, 1, 5, 8)
        train(scratch, run, second, 1)

        tuning = Config.model_validate(
            {"model": {"name": "cnn", "weights": str(path), "freeze": "backbone"}, "optim": {"lr": 0.1}}
        )
        tuned = build_model(tuning, 1, 5, 8)
        loaded = load_weights(tuned, tuning, 8, [str(digit) for digit in SECOND])
        assert loaded is not None and loaded.num_loaded == loaded.num_entries - 2
        train(tuned, tuning, second, 1)
        own = tuned.state_dict()
        backbone = {name: value for name, value in source.state_dict().items() if not name.startswith("9.")}
        assert "1.running_mean" in backbone
        assert all(torch.equal(own[name], value) for name, value in backbone.items()), (
            "weights and running statistics are those of the file, bit for bit"
        )
        assert not torch.equal(own["9.weight"], source.state_dict()["9.weight"])
        gains.append(accuracy(tuned, held_out) - accuracy(scratch, held_out))
    assert sum(gains) / len(gains) > 0.1
