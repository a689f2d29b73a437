"""Training on a GPU: the same losses as on CPU for every precision, recipe and input pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.base.codec import UNSET
from engine.runs.events import EpochEvent, Event, StepEvent
from engine.train.loop.train import run_training
from support.replace import replace
from support.runs.in_process import single_rank_trainer, warmup_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SMALL = ("data.batch_size=16", "run.epochs=2", "run.log_every=1", "optim.lr=0.01", "schedule.warmup_epochs=0")
FAKE = (*SMALL, "data.dataset=fake", "data.fake_train=50", "data.fake_val=21", "data.drop_last=false")
GRAY, COLOR = (*FAKE, "data.image_size=8", "data.channels=1"), (*FAKE, "data.image_size=12")
AMP = ("bf16", "fp16", "O1", "O2", "O3")
RECIPES = {
    "plain": (),
    "accumulate": ("optim.accumulate=2",),
    "clip": ("optim.clip_norm=0.1", "optim.clip_value=0.01"),
    "skip": ("optim.nonfinite=skip",),
    "ema": ("model.ema=0.9",),
    "mixup": ("augment.mixup=0.2", "augment.cutmix=0.5"),
    "augmentation": ("augment.crop_padding=2", "augment.flip=true", "augment.erasing=0.5", "augment.brightness=0.2"),
    "weights": ("loss.class_weights=balanced", "loss.label_smoothing=0.1"),
    "adamw": ("optim.name=adamw",),
    "channels_last": ("model.channels_last=on",),
}
# Every augmentation that runs on the device, and the per-image ones.
DETERMINISTIC_AUGMENTATIONS = [
    ("augment.resized_crop=true", "data.interpolation=nearest", "augment.mixup=0.2", "augment.cutmix=0.5"),
    ("augment.resized_crop=true", "data.interpolation=bicubic", "loss.label_smoothing=0.1"),
    ("augment.crop_padding=2", "augment.policy=randaugment", "augment.hue=0.1", "augment.brightness=0.2"),
]


def train(on_gpu: bool, *overrides: str, **options: Path) -> tuple[list[float], list[float]]:
    """Return the losses of all steps, and the validation losses."""
    events: list[Event] = []
    last_of_each = {override.partition("=")[0]: override for override in overrides}
    with single_rank_trainer(*last_of_each.values(), base=None, events=events, on_gpu=on_gpu, **options) as trainer:
        assert trainer.device.type == ("cuda" if on_gpu else "cpu")
        assert run_training(trainer, []) == "finished"
    steps = [loss for event in events if isinstance(event, StepEvent) for loss in event.losses]
    return steps, [event.val_loss for event in events if isinstance(event, EpochEvent)]


def assert_matches_cpu(*overrides: str, tolerance: float = 2e-2) -> None:
    on_gpu, on_cpu = train(True, *overrides), train(False, *overrides)
    assert len(on_gpu[0]) > 3
    assert on_gpu[0] == pytest.approx(on_cpu[0], rel=tolerance)
    assert on_gpu[1] == pytest.approx(on_cpu[1], rel=tolerance)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_on_gpu_matches_cpu(recipe: str) -> None:
    assert_matches_cpu(*COLOR, *RECIPES[recipe])


@pytest.mark.parametrize("recipe", [*(f"precision.amp={amp}" for amp in AMP), "optim.name=muon"])
def test_mixed_precision_on_gpu_matches_cpu(recipe: str) -> None:
    """Muon computes its update in bfloat16."""
    assert_matches_cpu(*COLOR, recipe, tolerance=5e-2)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("pipeline", ["memory", "stream"])
@pytest.mark.parametrize("recipe", DETERMINISTIC_AUGMENTATIONS)
def test_each_augmentation_trains_deterministically_on_gpu(recipe: tuple[str, ...], pipeline: str) -> None:
    options = (*COLOR, *recipe, "augment.flip=true", "augment.erasing=0.5", "run.epochs=1", f"data.pipeline={pipeline}")
    assert_matches_cpu(*options, "device.deterministic=true")


def test_warmup_counts_operations_on_rank_0_only() -> None:
    with single_rank_trainer("model.name=linear", on_gpu=True) as trainer:
        assert trainer.flops_by_size[8] > 0
        trainer.data.sampler = replace(trainer.data.sampler, rank=1)
        assert set(warmup_of(trainer).run()[0].values()) == {UNSET}


@pytest.mark.parametrize("images", [GRAY, COLOR], ids=["gray", "color"])
@pytest.mark.parametrize("pipeline", ["memory", "stream", "fixed"])
def test_each_pipeline_on_gpu_matches_cpu(images: tuple[str, ...], pipeline: str) -> None:
    assert_matches_cpu(*images, f"data.pipeline={pipeline}", "data.workers=1")


@pytest.mark.parametrize(("first_on_gpu", "then_on_gpu"), [(True, True), (True, False), (False, True)])
def test_resume_continues_checkpoint_of_other_device(tmp_path: Path, first_on_gpu: bool, then_on_gpu: bool) -> None:
    # The gradient of a bias before BatchNorm is rounding noise. With the usual epsilon, AdamW scales it to whole steps,
    # and BatchNorm's running mean, which lags behind the bias, differs between devices.
    recipe = (*COLOR, "optim.name=adamw", "optim.eps=1e-3", "model.ema=0.9")
    train(first_on_gpu, *recipe, "run.epochs=1", folder=tmp_path)
    checkpoint = tmp_path / "checkpoints" / "last.pt"
    resumed, whole = train(then_on_gpu, *recipe, checkpoint=checkpoint), train(False, *recipe)
    assert resumed[0] == pytest.approx(whole[0][-len(resumed[0]) :], rel=1e-2)
    assert resumed[1] == pytest.approx(whole[1][1:], rel=1e-2)
