"""Keys that are set and have no effect: which ones, and when they are worth a warning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.base.errors import Problem
from engine.config.effects import keys_without_effect_on_devices
from engine.config.loader import resolve_config
from support.messages import has_problem


def no_effect(*overrides: str, base: str | None = "digits") -> list[Problem]:
    """Return the warnings of a config, which has a learning rate of its own for any optimizer."""
    return [warning for _, warning in resolve_config(base, ["optim.lr=0.01", *overrides]).no_effect]


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["optim.name=adamw", "optim.momentum=0.9"], ["optim.name=adamw", "muon, rmsprop and sgd"]),
        (["optim.name=rprop", "optim.weight_decay=0.1"], ["optim.name=rprop"]),
        (["optim.name=adafactor", "optim.eps=0.1"], ["optim.name=adafactor", " eps ", "optim.options"]),
        (["schedule.name=onecycle", "schedule.warmup_epochs=2"], ["schedule.name=onecycle"]),
        (["schedule.milestones=[3]"], ["schedule.name=cosine", "multistep"]),
        (["data.pipeline=memory", "data.workers=3"], ["data.pipeline=memory", "auto and stream"]),
        (
            ["data.download=true"],
            ["data.dataset=digits"],
        ),
        (["device.parallel=dp", "device.static_graph=true"], ["device.parallel=dp", "ddp"]),
        (["device.parallel=dp", "device.bucket_cap_mb=50"], ["device.parallel=dp", "ddp"]),
        (["device.parallel=dp", "device.compress=bf16"], ["device.parallel=dp", "ddp"]),
        (["loss.name=my:loss", "loss.label_smoothing=0.1"], ["loss.name=my:loss"]),
        (
            [
                "task.name=multilabel",
                "data.dataset=csv",
                "data.path=a.csv",
                "loss.name=asl",
                "loss.class_weights=balanced",
            ],
            ["loss.name=asl"],
        ),
        (["run.early_stop_min_delta=0.1"], ["run.early_stop"]),
        (["data.workers=0", "data.prefetch=2"], ["data.workers=0"]),
        (["data.fit=squash"], []),
        (["data.interpolation=bicubic"], ["digits"]),
        (
            ["data.size_schedule=[8@1]", "data.val_crop=8", "data.image_size=8"],
            ["data.size_schedule", "data.val_crop"],
        ),
        (["augment.hue=0.1"], []),
        (["augment.mix_epochs=3"], ["augment.mixup", "augment.cutmix"]),
        (["optim.clip_norm_type=inf"], ["optim.clip_norm"]),
        (["optim.weight_decay=0", "optim.decay_norms=false"], ["optim.weight_decay"]),
        (["device.gpus=free:2", "device.ranks=3"], ["device.gpus"]),
        (["queue.priority=3"], ["device.wait (--queue)"]),
        (["run.code=."], ["(module:name)"]),
    ],
)
def test_set_key_without_effect_is_a_warning(overrides: list[str], values: list[str]) -> None:
    (found,) = no_effect(*overrides)
    key, _, _ = overrides[-1].partition("=")
    assert found.reason.startswith(f"{key}=")
    # A key such as optim.weight_decay is in the message beside the one without effect.
    assert has_problem([replace(found, reason=found.reason.partition(" ")[2])], "no-effect", "", *values)


def test_typed_keys_without_effect_on_devices() -> None:
    resolved = resolve_config("digits", ["device.ranks=3", "device.empty_cache=true", "optim.lr_scaling=sqrt"])

    def keys(world_size: int, *, on_gpu: bool, external: bool = False) -> list[str]:
        found = keys_without_effect_on_devices(
            resolved.config, resolved.typed, world_size, on_gpu=on_gpu, external=external
        )
        return [key for key, _ in found]

    assert keys(2, on_gpu=True) == ["device.ranks"]
    assert keys(3, on_gpu=False) == ["device.empty_cache"]
    assert keys(1, on_gpu=False) == ["device.empty_cache", "optim.lr_scaling"]
    preset = resolve_config("digits")
    waiting = resolve_config("digits", ["device.gpus=cpu", "device.wait=true"])
    assert waiting.no_effect == ()
    assert keys_without_effect_on_devices(waiting.config, waiting.typed, 4, on_gpu=False) == []
    [(key, _)] = keys_without_effect_on_devices(waiting.config, waiting.typed, 4, on_gpu=False, external=True)
    assert key == "device.wait"
    assert preset.config.device.ranks == 2
    assert keys_without_effect_on_devices(preset.config, preset.typed, 4, on_gpu=True) == []


def test_unused_keys_keep_their_defaults_and_warn_if_typed(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: {resume: true, epochs: 7}\nschedule: {name: step}\n")
    unused = dict.fromkeys(("run.resume", "run.name", "run.seed", "schedule.name"), "in a test")
    flags = {"run.resume": ("--resume", True), "run.seed": ("--seed", "0"), "run.epochs": ("--epochs", "8")}
    resolved = resolve_config(str(file), ["run.name=x"], flags, unused=unused)
    run = resolved.config.run
    assert (run.resume, run.name, run.epochs, resolved.config.schedule.name) == (False, None, 8, "constant")
    assert resolved.typed == {"run.epochs"}
    # A key with its default counts for nothing, as one of a file does.
    warnings = {part.key: part.warning for part in resolved.no_effect}
    assert has_problem([warnings["run.resume"]], "no-effect", "", "run.resume=true", "in a test")
    assert warnings.keys() == {"run.resume", "run.name"}
