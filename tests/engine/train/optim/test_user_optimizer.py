"""The user's own optimizer: what it is called with, what is refused, and that it resumes exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.errors import Problem
from engine.config.run_sections import RunConfig
from engine.config.training_sections import OptimConfig
from engine.train.optim.optimizers import build_optimizer, set_lr
from support.messages import has_problem, raises_problem
from support.models.small_model import same, small, train
from support.runs.in_process import train_in_process

# `Sign` keeps momentum in its state, and a count that changes its steps in its groups.
OPTIMIZERS = """
import torch
from torch.optim import SGD, Adam, LBFGS, Optimizer


class Sign(Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, decay=1.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "count": 0})
        self.decay = decay

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                p.add_(mean.sign(), alpha=-group["lr"] * self.decay ** group["count"])


class Unrestorable(Sign):
    def load_state_dict(self, state):
        raise ValueError("not implemented")


class Unsavable(Sign):
    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["object"] = Sign


class Unpicklable(Sign):
    def step(self, closure=None):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["rule"] = lambda value: value


class Twice(Sign):
    def step(self, closure=None):
        if self.param_groups[0]["count"]:
            raise RuntimeError("no second step please")
        super().step()


def adam(groups, lr, betas=(0.9, 0.99)):
    return Adam(groups, lr=lr, betas=betas)


def split(groups, lr):
    params = [p for group in groups for p in group["params"]]
    return SGD([{"params": params[:1], "lr": lr / 10}, {"params": params[1:]}], lr=lr)


def slow_first(groups, lr):
    groups[0]["lr"] = lr / 10
    return SGD(groups, lr=lr)


def loses(groups, lr):
    return SGD(groups[0]["params"][1:], lr=lr)


def sam(groups, lr, rho):
    return SGD(groups, lr=lr)


def heavy(groups, lr, momentum):
    return SGD(groups, lr=lr, momentum=momentum)


def number(groups):
    return 3


def failing(groups):
    raise ValueError("no groups please")


def lbfgs(groups, lr):
    return LBFGS([p for group in groups for p in group["params"]], lr=lr)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_optimizers", raising=False)
    (tmp_path / "own_optimizers.py").write_text(OPTIMIZERS)
    return RunConfig(code=str(tmp_path))


def config(name: str, **values: Any) -> OptimConfig:
    return OptimConfig(**{"name": f"own_optimizers:{name}", "lr": 0.01, **values})


def test_user_optimizer_gets_groups_settings_and_options(run: RunConfig) -> None:
    notes: list[Problem] = []
    decay: dict[str, Any] = {"weight_decay": 0.1, "weight_decay_groups": {"bias": 0.0}, "layer_lr": {"5": 0.5}}
    settings = config("Sign", momentum=0.5, nesterov=True, options={"decay": 0.9}, **decay)
    optimizer: Any = build_optimizer(settings, small(), run=run, notes=notes)
    assert type(optimizer).__name__ == "Sign" and optimizer.decay == 0.9
    groups = {(group["lr_scale"], group["weight_decay"]): group["param_names"] for group in optimizer.param_groups}
    assert groups[0.5, 0.1] == ["5.weight"] and groups[0.5, 0.0] == ["5.bias"]
    assert {group["momentum"] for group in optimizer.param_groups} == {0.5}
    assert {group["lr"] for group in optimizer.param_groups} == {0.01, 0.005}
    for note, values in zip(notes, (["optim.nesterov=True "], ["optim.weight_decay=0.1 "]), strict=True):
        assert has_problem([note], "no-effect", "", *values, "optim.name=own_optimizers:Sign")


def test_user_function_trains_as_the_optimizer_that_it_returns(run: RunConfig) -> None:
    ours, torchs = small(), small()
    train(ours, build_optimizer(config("adam", betas=(0.8, 0.9)), ours, run=run))
    train(torchs, torch.optim.Adam(torchs.parameters(), lr=0.01, betas=(0.8, 0.9)))
    assert same(ours, torchs)


def test_groups_of_user_function_keep_the_ratio_of_their_learning_rates(run: RunConfig) -> None:
    optimizer = build_optimizer(config("split"), small(), run=run)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5])
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]
    changed = build_optimizer(config("slow_first", layer_lr={"5": 0.5}), small(), run=run)
    set_lr(changed, 0.5)
    assert [group["lr"] for group in changed.param_groups] == pytest.approx([0.05, 0.25])


@pytest.mark.parametrize(
    ("name", "key", "argument"), [("sam", "optim.options", "rho"), ("heavy", "optim.momentum", "momentum")]
)
def test_required_argument_of_user_optimizer_names_its_key(run: RunConfig, name: str, key: str, argument: str) -> None:
    with raises_problem("missing-value", key, f"own_optimizers:{name} requires {argument}"):
        build_optimizer(config(name), small(), run=run)


@pytest.mark.parametrize(
    ("settings", "problem", "values"),
    [
        (config("loses"), "invalid-value", ["own_optimizers:loses ", " 1 of 8 ", " 0.weight"]),
        (config("number"), "invalid-value", ["own_optimizers:number ", "torch.optim.Optimizer", " int"]),
        (config("failing"), "user-code-failed", ["own_optimizers:failing ", "ValueError: no groups please ({}, line "]),
        (config("lbfgs"), "user-code-failed", ["own_optimizers:lbfgs ", "step()", "closure"]),
        (config("Unsavable"), "not-supported", ["own_optimizers:Unsavable "]),
        (config("Unpicklable"), "not-supported", ["own_optimizers:Unpicklable "]),
        (config("Unrestorable"), "user-code-failed", ["own_optimizers:Unrestorable ", "ValueError: not implemented"]),
        (config("Twice"), "user-code-failed", ["own_optimizers:Twice ", "RuntimeError: no second step please"]),
        (config("adam", options={"beta": 1}), "unknown-key", ["own_optimizers:adam ", "'beta'", "betas?"]),
        (config("adam", options={"lr": 1}), "unknown-key", ["lr ", "optim.lr"]),
    ],
)
def test_user_optimizer_that_does_not_work_is_refused(
    run: RunConfig, settings: OptimConfig, problem: str, values: list[str]
) -> None:
    location = "optim.options" if problem == "unknown-key" else "optim.name"
    shown = [value.format(Path(str(run.code)) / "own_optimizers.py") for value in values]
    with raises_problem(problem, location, *shown):
        build_optimizer(settings, small(), run=run)


def test_resumed_run_with_user_optimizer_equals_uninterrupted_run(run: RunConfig, tmp_path: Path) -> None:
    recipe = ("optim.name=own_optimizers:Sign", "optim.lr=0.001", "optim.options={decay: 0.99}", f"run.code={run.code}")
    whole = train_in_process(tmp_path / "whole", *recipe, "run.epochs=2", "model.ema=0.9", "checkpoint.keep=9")
    first = min((tmp_path / "whole" / "checkpoints").glob("step-*.pt"))
    resumed = train_in_process(tmp_path / "resumed", *recipe, "run.epochs=2", "model.ema=0.9", checkpoint=first)
    fields = ("epoch", "train_loss", "val_loss", "ema_val_loss", "lr")
    rows = [[[getattr(epoch, field) for field in fields] for epoch in epochs] for epochs in (whole, resumed)]
    assert rows[1] == rows[0][1:] and len(rows[1]) == 1
