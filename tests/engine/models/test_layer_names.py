"""Weights, optimizer states and configs with the earlier layer names of resnet18-small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.config.layer_names import checkpoint_with_current_names
from engine.config.loader import validate_config
from engine.config.resume import find_changes
from engine.config.schema import Config, as_stored
from engine.models.ema import ModelEma
from engine.models.factory import build_model
from engine.models.freeze import freeze
from engine.models.transfer import load_weights
from engine.optim.optimizers import build_optimizer, restore_optimizer
from engine.runs.checkpoint_files import CHECKPOINT_KEYS
from engine.training.checkpoint import load_checkpoint, save_checkpoint

WIDTH, CLASSES = 2, 3
SMALL = {"name": "resnet18-small", "options": {"width": WIDTH}}
EARLIER = {"model": SMALL | {"freeze": [0, "4.conv1"]}, "optim": {"momentum": 0.9, "layer_lr": {"5.shortcut": 0.5}}}
CURRENT = {
    "model": SMALL | {"freeze": ["conv1", "layer1.1.conv1"]},
    "optim": {"momentum": 0.9, "layer_lr": {"layer2.0.downsample": 0.5}},
}


class EarlierBlock(nn.Module):
    """The block as an earlier version defined it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def earlier_model() -> nn.Sequential:
    stem = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=True)
    blocks, inputs = list[nn.Module](), WIDTH
    for outputs, stride in ((WIDTH, 1), (2 * WIDTH, 2), (4 * WIDTH, 2), (8 * WIDTH, 2)):
        blocks += [EarlierBlock(inputs, outputs, stride), EarlierBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def current_model(config: Config) -> nn.Module:
    return build_model(config, 1, CLASSES, 8)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ema: ModelEma, steps: range) -> None:
    for step in steps:
        images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.arange(4) % CLASSES).backward()
        optimizer.step()
        ema.update(model, step + 1)
    ema.copy_buffers(model)


def assert_same_values(model: nn.Module, other: nn.Module) -> None:
    for value, expected in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


def test_same_seed_gives_same_initial_weights() -> None:
    torch.manual_seed(3)
    earlier = earlier_model()
    torch.manual_seed(3)
    assert_same_values(current_model(validate_config(CURRENT)), earlier)


def test_config_with_earlier_names_gets_current_names() -> None:
    assert validate_config(EARLIER) == validate_config(CURRENT)
    model = {"name": "cnn", "freeze": ["0"]}
    assert validate_config({"model": model}).model.freeze == ("0",)


def test_earlier_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    earlier, config = earlier_model(), validate_config(CURRENT)
    # An earlier version took the names in its config as they are.
    before = config.model_copy(update={"model": config.model.model_copy(update={"freeze": ("0", "4.conv1")})})
    freeze(earlier, before.model)
    earlier_optim = before.optim.model_copy(update={"layer_lr": {"5.shortcut": 0.5}})
    optimizer, ema = build_optimizer(earlier_optim, earlier), ModelEma(earlier, 0.9)
    train(earlier, optimizer, ema, range(2))
    state: dict[str, Any] = dict.fromkeys(CHECKPOINT_KEYS, 0) | {
        "step": 2,
        "config": as_stored(before.model_copy(update={"optim": earlier_optim})),
        "model": earlier.state_dict(),
        "ema": ema.model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    loaded = load_checkpoint(save_checkpoint(state, tmp_path, best=False, keep=1))

    assert find_changes(loaded["config"], config) == []
    model = current_model(config)
    freeze(model, config.model)
    model.load_state_dict(loaded["model"])
    resumed_optimizer, resumed_ema = build_optimizer(config.optim, model), ModelEma(model, 0.9)
    restore_optimizer(resumed_optimizer, loaded["optimizer"])
    resumed_ema.model.load_state_dict(loaded["ema"])
    train(earlier, optimizer, ema, range(2, 4))
    train(model, resumed_optimizer, resumed_ema, range(2, 4))
    assert_same_values(model, earlier)
    assert_same_values(resumed_ema.model, ema.model)


@pytest.mark.parametrize("optimizer", [None, {"param_groups": 5}, {"param_groups": [5, {"param_names": 5}]}])
def test_malformed_checkpoint_is_left_to_its_checks(optimizer: Any) -> None:
    state = {"config": {"model": SMALL | {"freeze": 5}, "optim": {"layer_lr": 5}}, "model": 5, "optimizer": optimizer}
    assert checkpoint_with_current_names(state)["model"] == 5
    for config in (5, {"model": 5}, {"model": {"name": [5]}}):
        assert checkpoint_with_current_names({"config": config}) == {"config": config}


def test_load_weights_reads_earlier_export(tmp_path: Path) -> None:
    earlier, path = earlier_model(), tmp_path / "model.safetensors"
    save_file(earlier.state_dict(), path)
    config = validate_config({"model": SMALL | {"weights": str(path)}})
    model = current_model(config)
    loaded = load_weights(model, config, 8, ("a", "b", "c"))
    assert loaded is not None and loaded.skipped == ()
    assert_same_values(model, earlier)
