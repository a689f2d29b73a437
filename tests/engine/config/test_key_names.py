"""Suggestions for config keys: names of other libraries come before similar names."""

from __future__ import annotations

import pytest

from engine.config.key_names import key_hint


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("optim.wd", "optim.weight_decay"),
        ("optim.weightdecay", "optim.weight_decay"),
        ("weight-decay", "optim.weight_decay"),
        ("optimizer", "optim.name"),
        ("model", "model.name"),
        ("data", "data.dataset"),
        ("batch", "data.batch_size"),
        ("data.batch", "data.batch_size"),
        ("schedule.epochs", "run.epochs"),
        ("OPTIM.LR", "optim.lr"),
        ("optm.lr", "optim.lr"),
        ("optim.momentun", "optim.momentum"),
        ("name", "run.name or task.name or model.name or loss.name or optim.name or schedule.name"),
    ],
)
def test_key_hint_suggests_key(word: str, key: str) -> None:
    assert key_hint(word) == f"; did you mean {key}?"
