"""Warmup: models and configs that cannot train are rejected, and FLOPs are counted on two images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from engine.base.errors import UsageError
from engine.base.process import SignalHandler
from engine.config.loader import resolve_config
from engine.runs.control import RequestCounters
from engine.train.distributed.channel import Channel
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.job import Job
from engine.train.loop.train import train
from engine.train.models.summary import summarize_model
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer, warmup_of

NETS = """
import torch
from torch import nn

class Spare(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.used, self.spare = nn.Linear(size * size, classes), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.flatten(1))

class Alone(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.layer = nn.Linear(size * size, classes)

    def forward(self, x):
        return self.layer(x.flatten(1).to(torch.float32))

class Unpooled(nn.Module):
    def __init__(self, classes, size):
        super().__init__()
        self.conv, self.pool, self.unpool = nn.Conv2d(1, 1, 1), nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.resize, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.resize(self.unpool(*self.pool(self.conv(x)))).flatten(1))

class Picky(Spare):
    def forward(self, x):
        if self.training:
            raise ValueError("no more than it wants")
        return self.used(x.flatten(1))

class Pair(Alone):
    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)

class Mean(Alone):
    def forward(self, x):
        return super().forward(x).mean(0, keepdim=True)

class Frozen(Alone):
    def forward(self, x):
        return super().forward(x).detach()

class Twice(Spare):
    def forward(self, x):
        return self.used(x.flatten(1).repeat(1, 2 if self.training else 1))
"""


@pytest.mark.parametrize(
    ("name", "recipe", "code", "values"),
    [
        ("Spare", (), "unused-weights", ["nets:Spare", "spare.weight, spare.bias", "model.freeze"]),
        ("Picky", (), "user-code-failed", ["nets:Picky", "2 images", "ValueError: ", "({code}, line 33)"]),
        ("Twice", (), "user-code-failed", ["nets:Twice", "2 images", "RuntimeError: "]),
        ("Twice", (), "user-code-failed", ["({code}, line 50)"]),
        ("Pair", (), "invalid-value", ["nets:Pair", " tuple ", "2 x 10"]),
        ("Mean", (), "invalid-value", ["nets:Mean", " 1 x 10 ", "2 x 10"]),
        ("Frozen", (), "invalid-value", ["nets:Frozen", "without a gradient"]),
        ("Alone", ("precision.amp=O3",), "user-code-failed", ["nets:Alone ", "RuntimeError: "]),
    ],
)
def test_warmup_rejects_model_that_cannot_train(
    name: str, recipe: tuple[str, ...], code: str, values: list[str], tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    with (
        raises_problem(code, None, *(value.format(code=tmp_path / "nets.py") for value in values)),
        single_rank_trainer(f"model.name=nets:{name}", f"run.code={tmp_path}", *recipe),
    ):
        pass


def test_train_without_supervisor_checks_config_on_ranks() -> None:
    wrong = ["schedule.warmup_epochs=0", "schedule.warmup_steps=9999", "device.ranks=2"]
    config = resolve_config("digits", wrong).config
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    with pytest.raises(UsageError) as caught:
        train(Job(config, plan_node(config, []), None, False, None), RankInfo(0, 2, 0, 2), dist.HashStore(), channel)
    assert {problem.location for problem in caught.value.problems} == {"schedule.warmup_steps"}


def test_build_trainer_reports_weights_loss_and_optimizer_problems_together(tmp_path: Path) -> None:
    wrong = ("model.freeze=[nope]", "optim.layer_lr={9x: 1}", "loss.name=os:getcwd")
    with pytest.raises(UsageError) as caught, single_rank_trainer(*wrong, f"run.code={tmp_path}"):
        pass
    assert {problem.location for problem in caught.value.problems} == {"model.freeze", "optim.layer_lr", "loss.name"}


@pytest.mark.usefixtures("deterministic")
def test_warmup_names_operator_without_deterministic_kernel(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    options = ("model.name=nets:Unpooled", f"run.code={tmp_path}", "device.deterministic=true")
    named = ("nets:Unpooled", "max_unpooling2d_forward_out", "CPU", "device.deterministic=false", "model.name")
    with raises_problem("not-supported", "device.deterministic", *named), single_rank_trainer(*options):
        pass


def test_count_flops_is_three_forward_passes_minus_first_layer_gradient() -> None:
    overrides = ["model.name=resnet18-small", "data.image_size=32"]
    forward = 2 * summarize_model(resolve_config("digits", overrides).config).multiply_adds
    first_layer = 2 * 64 * 9 * 32 * 32
    with single_rank_trainer(*overrides) as fit:
        before = [parameter.grad for parameter in fit.model.network.parameters()]
        assert warmup_of(fit).count_flops() == 3 * forward - first_layer
        assert before == [parameter.grad for parameter in fit.model.network.parameters()] == [None] * len(before)
    with single_rank_trainer(*overrides, "model.freeze=backbone") as fit:
        assert forward < warmup_of(fit).count_flops() < 1.01 * forward


@pytest.mark.parametrize(("batch_size", "expected"), [(16, {False}), (2, {True})])
def test_warmup_benchmarks_cudnn_for_batches_of_training_only(batch_size: int, expected: set[bool]) -> None:
    seen: set[bool] = set()
    with single_rank_trainer("model.name=linear", f"data.batch_size={batch_size}") as trainer:
        hook = register_module_forward_pre_hook(lambda *_: seen.add(torch.backends.cudnn.benchmark))
        try:
            warmup_of(trainer).run()
        finally:
            hook.remove()
        assert torch.backends.cudnn.benchmark
    assert seen == expected
