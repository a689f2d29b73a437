"""Fine-tuning: weights trained on some classes improve training on others."""

from __future__ import annotations

from pathlib import Path

import torch

from support.gputrain_command import last_checkpoint_weights
from support.runs.in_process import train_in_process

HALVES = """
import numpy as np
from engine.data.sources.builtin import open_digits
from engine.config.data_sections import DataConfig

class Half:
    def __init__(self, part, first):
        digits = open_digits(DataConfig(), 0)
        labels = digits.get_labels(part)
        chosen = np.flatnonzero((labels >= first) & (labels < first + 5))
        self.images = digits.load(part, chosen)[0][:, 0]
        self.targets = (labels[chosen] - first).tolist()
        self.classes = [str(first + number) for number in range(5)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]

def low(part):
    return Half(part, 0)

def high(part):
    return Half(part, 5)
"""
RECIPE = ("data.batch_size=64", "optim.lr=0.1", "schedule.name=constant", "schedule.warmup_epochs=0")


def test_fine_tuning_with_frozen_backbone_beats_training_from_scratch(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    code = (*RECIPE, f"run.code={tmp_path}")
    train_in_process(tmp_path / "low", *code, "data.dataset=halves:low", "run.epochs=5")
    pretrained_weights = tmp_path / "low" / "checkpoints" / "last.pt"

    high = (*code, "data.dataset=halves:high", "run.epochs=1")
    frozen = (f"model.weights={pretrained_weights}", "model.freeze=backbone")
    (scratch,) = train_in_process(tmp_path / "scratch", *high)
    (tuned,) = train_in_process(tmp_path / "tuned", *high, *frozen)
    assert tuned.val_accuracy > scratch.val_accuracy + 0.1

    before, after = last_checkpoint_weights(tmp_path / "low"), last_checkpoint_weights(tmp_path / "tuned")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"9.weight", "9.bias"}, "only the last layer, without BatchNorm statistics"
    optimizer = torch.load(tmp_path / "tuned" / "checkpoints" / "last.pt", weights_only=True)["optimizer"]
    assert [group["param_names"] for group in optimizer["param_groups"]] == [["9.weight", "9.bias"]]
