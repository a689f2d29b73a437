"""channels_last changes the memory format and nothing that is saved or displayed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.base.errors import UsageError
from engine.config.loader import resolve_config
from engine.config.precision import uses_tf32
from engine.config.schema import Config
from engine.runs.events import EpochEvent
from engine.train.loop.loop import train_step
from engine.train.models.factory import build_model
from engine.train.models.precision import resolve_memory_format
from support.gputrain_command import last_checkpoint_weights
from support.runs.in_process import single_rank_trainer, train_in_process

SMALL = ("data.dataset=fake", "data.fake_train=96", "data.fake_val=48", "data.image_size=8", "data.channels=3")
SMALL += ("checkpoint.every_steps=4",)


def losses(epochs: list[EpochEvent]) -> list[tuple[float, float]]:
    return [(epoch.train_loss, epoch.val_loss) for epoch in epochs]


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_resume_works_across_memory_formats(name: str, tmp_path: Path) -> None:
    recipe = (*SMALL, f"optim.name={name}", "optim.lr=0.001", "model.ema=0.9", "run.epochs=2")
    whole = train_in_process(tmp_path / "whole", *recipe, "model.channels_last=on")
    first = next((tmp_path / "whole" / "checkpoints").glob("step-*4.pt"))
    same = train_in_process(tmp_path / "same", *recipe, "model.channels_last=on", checkpoint=first)
    train_in_process(tmp_path / "other", *recipe, "model.channels_last=off", checkpoint=first)
    assert losses(same) == losses(whole)[-len(same) :]
    weights, same_weights, other_weights = (
        last_checkpoint_weights(tmp_path / run) for run in ("whole", "same", "other")
    )
    for key, value in weights.items():
        assert value.is_contiguous()
        assert torch.equal(value, same_weights[key])
        if value.ndim == 4:
            # Fused optimizers read wrong values if state and weights differ in strides.
            assert (value - other_weights[key]).abs().mean() < 1e-4


@pytest.mark.parametrize(
    ("recipe", "capability", "last"),
    [
        (("model.name=cnn",), None, True),
        (("model.name=linear",), None, False),
        (("model.name=cnn", "model.channels_last=off"), None, False),
        (("model.name=cnn",), (7, 0), False),
        (("model.name=cnn",), (8, 0), True),
        (("model.name=cnn", "precision.tf32=off"), (8, 0), False),
        (("model.name=cnn", "precision.amp=bf16", "precision.tf32=off"), (8, 0), True),
        (("model.name=cnn", "precision.amp=O0"), (7, 0), False),
        (("model.name=cnn", "model.channels_last=on"), (7, 0), True),
    ],
)
def test_memory_format_auto_uses_channels_last_only_where_faster(
    recipe: tuple[str, ...], capability: tuple[int, int] | None, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = resolve_config("digits", recipe).config
    tf32 = uses_tf32(config.precision, capability)
    monkeypatch.setattr("engine.train.models.precision.tf32_is_on", lambda device: tf32)
    device = torch.device("cpu" if capability is None else "cuda")
    chosen = resolve_memory_format(config, build_model(config, 1, 10, 8), device)
    assert chosen == (torch.channels_last if last else torch.contiguous_format)


NET = """
from torch import nn

class Viewing(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.conv, self.last = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4 * size * size, classes)

    def forward(self, x):
        x = self.conv(x)
        return self.last(x.view(x.size(0), -1))
"""


def test_memory_format_auto_leaves_user_model_contiguous(tmp_path: Path) -> None:
    (tmp_path / "viewing.py").write_text(NET)
    own = (*SMALL, "model.name=viewing:Viewing", f"run.code={tmp_path}")
    with single_rank_trainer(*own) as trainer:
        train_step(trainer)
    with (
        pytest.raises(UsageError, match=r"model\.channels_last: viewing:Viewing "),
        single_rank_trainer(*own, "model.channels_last=on"),
    ):
        pass
