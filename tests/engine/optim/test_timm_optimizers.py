"""timm's optimizers: equal to those of timm, and rejected with a reason if unsupported."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from engine.config.effects import optimizer_keys_without_effect
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig
from engine.optim import timm_optimizers
from engine.optim.optimizers import build_optimizer, optimizer_step
from engine.optim.timm_optimizers import timm_optimizer_problems, timm_options
from engine.utils.errors import UsageError
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


def test_timm_adamc_uses_scaled_lr_as_maximum() -> None:
    optimizer = build_optimizer(OptimConfig(name="timm:adamc", lr=0.1, lr_scaling="linear"), small(), world_size=4)
    assert optimizer.defaults["lr"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimConfig(name="timm:lamp"), "optim.name: timm has no optimizer 'lamp'; did you mean timm:lamb?"),
        (OptimConfig(name="timm:adahessian"), "needs second derivatives of the loss, which a plain step does not have"),
        (OptimConfig(name="timm:fusedadam"), "optim.name: timm:fusedadam cannot be used: it needs apex, which is not"),
        (
            OptimConfig(name="timm:bnbadam"),
            "optim.name: timm:bnbadam cannot be used: it needs bitsandbytes, which is not",
        ),
        (OptimConfig(name="timm:lookahead_adam"), "timm's lookahead wrapper is not supported"),
        (OptimConfig(name="timm:lamb", options={"trust_clp": True}), "did you mean trust_clip?"),
        (
            OptimConfig(name="timm:lamb", options={"trust_clip": 3}),
            "optim.options: trust_clip must be true or false, not 3",
        ),
    ],
)
def test_timm_optimizer_rejects_unsupported_config(config: OptimConfig, message: str) -> None:
    assert message in str(UsageError(timm_optimizer_problems(config)))
    assert message in refused(config, small())


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (OptimConfig(name="timm:lamb", momentum=0.9), "optim.momentum=0.9 has no effect with optim.name=timm:lamb"),
        (
            OptimConfig(name="timm:adan", betas=(0.9, 0.9)),
            "optim.betas=[0.9, 0.9] has no effect with optim.name=timm:adan, whose betas is set in optim.options",
        ),
    ],
)
def test_key_that_timm_optimizer_lacks_has_no_effect(optim: OptimConfig, message: str) -> None:
    assert timm_optimizer_problems(optim) == []
    found = optimizer_keys_without_effect(Config(optim=optim), timm_options(optim.name))
    assert [part.message for part in found] == [message]


@pytest.mark.parametrize(
    ("name", "options"),
    [("timm:adafactorbv", {"momentum_dtype": "none such"}), ("timm:muon", {"ns_coefficients": "none such"})],
)
def test_timm_optimizer_reports_constructor_error_as_usage_error(name: str, options: dict[str, Any]) -> None:
    message = refused(OptimConfig(name=name, options=options), small())
    assert message.startswith(f"optim.options: {name} cannot be created with these options: ")
    assert "none such" in message


def test_timm_options_are_unaffected_by_output_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("print('{}')\n")
    (tmp_path / "timm" / "optim.py").write_text(
        "import os\n"
        "os.write(1, b'a word without an end')\n"
        "class Info:\n    second_order, defaults = True, {}\n    opt_class = dict\n"
        "def list_optimizers():\n    print('another word')\n    return ['stub']\n"
        "def get_optimizer_info(name):\n    return Info\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="timm:stub cannot be used: it needs second derivatives"):
        timm_options("timm:stub")


@pytest.mark.parametrize(
    "damaged", [{"lamb": None}, {"lamb": {}}, {"lamb": {"options": {"eps": 1}}}, ["lamb"]], ids=str
)
def test_timm_options_rewrite_damaged_cache(damaged: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "gputrain" / f"optimizers-timm-{timm_optimizers.version('timm')}.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"optimizers": damaged}))
    described = {"lamb": {"options": {"eps": {"default": 1e-6, "optional": False}}}}
    monkeypatch.setattr(timm_optimizers, "ask_helper", lambda _: described)
    assert timm_options("timm:lamb")["eps"].default == 1e-6
    assert json.loads(path.read_text()) == {"optimizers": described}


def test_timm_optimizer_without_timm_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(timm_optimizers, "version", absent)
    [problem] = timm_optimizer_problems(OptimConfig(name="timm:lamb"))
    assert str(problem) == "optim.name: timm is not installed: pip install timm"
    assert timm_optimizer_problems(OptimConfig(name="sgd")) == []
