"""timm's optimizers: equal to those of timm, and rejected with a reason if unsupported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.base import libraries
from engine.config.effects import optimizer_keys_without_effect
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig
from engine.train.optim.optimizers import build_optimizer, optimizer_step
from engine.train.optim.timm_optimizers import timm_optimizer_problems, timm_options
from support.messages import has_problem
from support.models.small_model import refused, resumes_identically, same, small, train


@pytest.mark.parametrize(
    ("name", "values", "arguments"),
    [
        ("lamb", {"weight_decay": 0.1, "options": {"trust_clip": True}}, {"weight_decay": 0.1, "trust_clip": True}),
        ("lion", {"betas": (0.8, 0.9)}, {"betas": (0.8, 0.9)}),
        ("sgdw", {}, {"momentum": 0.9}),
        ("adan", {"options": {"betas": [0.9, 0.8, 0.7]}}, {"betas": (0.9, 0.8, 0.7)}),
        ("muon", {"nesterov": True}, {"momentum": 0.95, "nesterov": True}),
    ],
)
def test_timm_optimizer_matches_timm(name: str, values: dict[str, Any], arguments: dict[str, Any]) -> None:
    # It takes two seconds, which every xdist worker would spend while it collects.
    import timm

    config = OptimConfig(name=f"timm:{name}", lr=0.01, **values)
    assert timm_optimizer_problems(config) == []
    ours, theirs = small(), small()
    train(ours, build_optimizer(config, ours))
    train(theirs, timm.optim.create_optimizer_v2(theirs.parameters(), name, 0.01, **arguments))
    assert same(ours, theirs)
    assert not same(ours, small())


@pytest.mark.parametrize("name", ["timm:lamb", "timm:sgd", "timm:adopt", "timm:nadamlegacy"])
def test_timm_optimizer_resumes_and_skips_steps(name: str) -> None:
    config = OptimConfig(name=name, lr=0.01, decay_norms=False, weight_decay=0.1)
    model, later = small(), small(7)
    optimizer = build_optimizer(config, model)
    model(torch.full((1, 1, 8, 8), float("nan"))).sum().backward()
    optimizer_step(optimizer, torch.tensor(True), may_skip=True)
    assert same(model, small())
    model.load_state_dict(small().state_dict())
    train(model, optimizer)
    assert resumes_identically(config, model, optimizer, later)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"name": "timm:lamp"}, ("unknown-value", "optim.name", "'lamp'", "timm:lamb?")),
        ({"name": "timm:adahessian"}, ("not-supported", "optim.name", "timm:adahessian")),
        ({"name": "timm:fusedadam"}, ("not-supported", "optim.name", "timm:fusedadam", "apex")),
        ({"name": "timm:bnbadam"}, ("not-supported", "optim.name", "timm:bnbadam", "bitsandbytes")),
        ({"name": "timm:lookahead_adam"}, ("not-supported", "optim.name", "timm:lookahead_adam")),
        ({"name": "timm:lamb", "options": {"trust_clp": True}}, ("unknown-key", "optim.options", "trust_clip?")),
    ],
)
def test_timm_optimizer_rejects_unsupported_config(values: dict[str, Any], problem: tuple[str, ...]) -> None:
    config = OptimConfig(**values)
    assert has_problem(timm_optimizer_problems(config), *problem)
    assert has_problem(refused(config, small()), *problem)


@pytest.mark.parametrize(
    ("optim", "values"),
    [
        (OptimConfig(name="timm:lamb", momentum=0.9), ["optim.momentum=0.9 ", "optim.name=timm:lamb"]),
        (
            OptimConfig(name="timm:adan", betas=(0.9, 0.9)),
            ["optim.betas=[0.9, 0.9] ", "optim.name=timm:adan", " betas ", "optim.options"],
        ),
    ],
)
def test_key_that_timm_optimizer_lacks_has_no_effect(optim: OptimConfig, values: list[str]) -> None:
    assert timm_optimizer_problems(optim) == []
    [found] = optimizer_keys_without_effect(Config(optim=optim), timm_options(optim.name))
    assert has_problem([found.warning], "no-effect", "", *values)


def test_timm_optimizer_without_timm_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda _: None)
    [problem] = timm_optimizer_problems(OptimConfig(name="timm:lamb"))
    assert has_problem([problem], "not-installed", "optim.name", "pip install timm")
    assert timm_optimizer_problems(OptimConfig(name="sgd")) == []
