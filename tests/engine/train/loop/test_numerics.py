"""Numerics of a training step: precision levels, gradient accumulation, clipping, EMA weights, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.runs.events import Event, StepEvent
from engine.train.loop.loop import train_step
from engine.train.loop.train import run_training
from support.gputrain_command import Gputrain, last_checkpoint_weights
from support.runs.in_process import single_rank_trainer, train_in_process

# Without BatchNorm the result does not depend on how images are grouped into batches.
PLAIN = ("model.name=linear", "schedule.name=constant", "optim.momentum=0.9", "optim.lr=0.05")


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# On the CPU, a convolution in float16 takes twenty times as long as in float32.
NIGHTLY_CNN = [pytest.param("cnn", level, marks=pytest.mark.nightly) for level in ("O1", "O2", "O3")]


@pytest.fixture(scope="module")
def float32_accuracies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Validation accuracy of each model on the digits after two epochs."""
    folder = tmp_path_factory.mktemp("float32")
    return {
        model: train_in_process(folder / model, "run.epochs=2", f"model.name={model}")[-1].val_accuracy
        for model in ("linear", "cnn")
    }


@pytest.mark.parametrize(
    ("model", "level"),
    [*(("linear", level) for level in ("O0", "O1", "bf16", "O2", "O3")), ("cnn", "O0"), ("cnn", "bf16"), *NIGHTLY_CNN],
)
def test_every_precision_level_learns_as_float32(
    model: str, level: str, float32_accuracies: dict[str, float], tmp_path: Path
) -> None:
    options = ("run.epochs=2", f"model.name={model}", f"precision.amp={level}")
    accuracy = train_in_process(tmp_path / level, *options)[-1].val_accuracy
    float32_accuracy = float32_accuracies[model]
    if level == "O0":
        assert accuracy == float32_accuracy
    assert accuracy > float32_accuracy - 0.03
    assert float32_accuracy > 0.9


def test_o2_precision_keeps_float32_batch_norm_and_master_weights() -> None:
    with single_rank_trainer("precision.amp=O2") as trainer:
        assert trainer.model.master is not None
        for part in trainer.model.network.modules():
            dtypes = {p.dtype for p in part.parameters(recurse=False)}
            assert dtypes <= ({torch.float32} if isinstance(part, nn.BatchNorm2d) else {torch.float16})
        before = flat(trainer.model.master).clone()
        trainer.model.network.train()
        train_step(trainer)
        assert {p.dtype for p in trainer.model.master.parameters()} == {torch.float32}
        assert not torch.equal(flat(trainer.model.master), before)
        assert torch.equal(flat(trainer.model.master).half(), flat(trainer.model.network).half())


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_checkpoint_of_half_model_holds_float32_master_weights(level: str, tmp_path: Path) -> None:
    small = ("data.dataset=fake", "data.fake_train=64", "data.fake_val=32", "data.image_size=8")
    with single_rank_trainer(f"precision.amp={level}", "run.epochs=1", *small, folder=tmp_path) as trainer:
        run_training(trainer, [])
        saved = last_checkpoint_weights(tmp_path)
        assert {value.dtype for value in saved.values()} <= {torch.float32, torch.int64}
        trained = trainer.model.optimized.state_dict()
        assert all(
            torch.equal(saved[name], trained[name].float()) for name, _ in trainer.model.optimized.named_parameters()
        )
        means = trainer.model.network.state_dict()["1.running_mean"]
        assert torch.equal(saved["1.running_mean"], means.float())


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_gradient_accumulation_matches_large_batch(micro_batches: int) -> None:
    results = []
    for options in (
        ("data.batch_size=32",),
        (f"data.batch_size={32 // micro_batches}", f"optim.accumulate={micro_batches}"),
    ):
        with single_rank_trainer(*PLAIN, *options) as trainer:
            for _ in range(5):
                train_step(trainer)
            results.append(
                (
                    flat(trainer.model.network),
                    trainer.log.train_metrics.all_reduce(),
                    trainer.data.sampler.steps_per_epoch,
                )
            )
    (whole, of_whole, steps), (split, of_split, steps_split) = results
    assert torch.allclose(whole, split, rtol=1e-5, atol=1e-6)
    assert (of_whole.images, of_whole.accuracy, steps) == (of_split.images, of_split.accuracy, steps_split)
    assert of_whole.loss == pytest.approx(of_split.loss)


def test_gradient_accumulation_on_two_ranks_matches_large_batch(gputrain: Gputrain, tmp_path: Path) -> None:
    options = (*PLAIN, "data.drop_last=false", "checkpoint.every_minutes=0")
    sharing = ("data.batch_size=25", "optim.accumulate=4", "device.ranks=2")
    done = gputrain("run", "--headless", "digits", "--name", "two", "--epochs", "1", *options, *sharing)
    assert done.returncode == 0, done.stderr
    train_in_process(tmp_path / "one", *options, "run.epochs=1", "data.batch_size=200")
    two_ranks, one_rank = last_checkpoint_weights(gputrain.runs / "two"), last_checkpoint_weights(tmp_path / "one")
    # The last step of the epoch has 38 images: a single micro-batch of 19 per rank.
    assert all(torch.allclose(two_ranks[name], one_rank[name], rtol=1e-5, atol=1e-6) for name in one_rank)


@pytest.mark.parametrize(
    ("norm_type", "norm"), [("2", lambda g: g.norm()), ("1", lambda g: g.abs().sum()), ("inf", lambda g: g.abs().max())]
)
def test_clip_norm_limits_gradient_for_any_norm_type(norm_type: str, norm: object) -> None:
    with single_rank_trainer("optim.clip_norm=0.01", f"optim.clip_norm_type={norm_type}") as trainer:
        for parameter in trainer.model.network.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = torch.cat([p.grad.flatten() for p in trainer.model.network.parameters() if p.grad is not None])
        assert trainer.model.clip_gradients().isfinite()
        after = torch.cat([p.grad.flatten() for p in trainer.model.network.parameters() if p.grad is not None])
        assert callable(norm)
        assert norm(after) == pytest.approx(0.01, rel=1e-4)
        assert torch.allclose(after / after.norm(), before / before.norm(), atol=1e-6)


def test_clip_norm_of_float16_gradient_is_computed_in_float32() -> None:
    with single_rank_trainer("optim.clip_norm=1", "precision.amp=O3") as trainer:
        # The norm is above 65,504, the largest number of float16.
        for parameter in trainer.model.network.parameters():
            parameter.grad = torch.full_like(parameter, 2000.0)
        assert trainer.model.clip_gradients().isfinite()
        gradients = [p.grad.float() for p in trainer.model.network.parameters() if p.grad is not None]
        assert torch.nn.utils.get_total_norm(gradients).item() == pytest.approx(1, rel=0.05)


def test_clip_value_clamps_gradient() -> None:
    with single_rank_trainer("optim.clip_value=0.5") as trainer:
        for parameter in trainer.model.network.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = [p.grad.clone() for p in trainer.model.network.parameters() if p.grad is not None]
        assert trainer.model.clip_gradients().isfinite()
        after = [p.grad for p in trainer.model.network.parameters() if p.grad is not None]
        assert all(torch.equal(new, old.clamp(-0.5, 0.5)) for new, old in zip(after, before, strict=True))


def test_clip_norm_applies_to_unscaled_gradient() -> None:
    with single_rank_trainer("optim.clip_norm=0.01", "precision.amp=fp16", "optim.momentum=0", "optim.lr=1") as trainer:
        before = flat(trainer.model.network).clone()
        trainer.data.position.step_in_epoch = 21
        train_step(trainer)
        lr = trainer.model.optimizer.param_groups[0]["lr"]
        decay = trainer.model.optimizer.param_groups[0]["weight_decay"]
        assert ((before - flat(trainer.model.network)) / lr - decay * before).norm() == pytest.approx(0.01, rel=0.01)


def test_ema_follows_warmup_formula() -> None:
    with single_rank_trainer(*PLAIN, "model.ema=0.5") as trainer:
        assert trainer.model.ema is not None
        expected = flat(trainer.model.network).clone()
        for step in range(1, 8):
            train_step(trainer)
            decay = min(0.5, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * flat(trainer.model.network)
        assert torch.allclose(flat(trainer.model.ema.network), expected, atol=1e-6)
        assert not torch.allclose(flat(trainer.model.network), expected, atol=1e-3)


def test_ema_weights_are_evaluated_and_saved(tmp_path: Path) -> None:
    epochs = train_in_process(tmp_path, "run.epochs=2", "model.ema=0.9", "optim.lr=0.3")
    assert all(0 < epoch.ema_val_accuracy <= 1 for epoch in epochs)
    assert epochs[-1].ema_val_loss != epochs[-1].val_loss
    saved = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert saved["ema"].keys() == saved["model"].keys()
    assert not torch.equal(saved["ema"]["0.weight"], saved["model"]["0.weight"])
    assert torch.equal(saved["ema"]["1.running_mean"], saved["model"]["1.running_mean"])


@pytest.mark.parametrize(
    "recipe",
    [
        ("precision.amp=O2", "optim.clip_norm=1"),
        pytest.param(("precision.amp=O3", "model.ema=0.9"), marks=pytest.mark.nightly),
        ("schedule.name=plateau", "schedule.patience=0", "schedule.threshold=0.9", "model.ema=0.9"),
        ("optim.name=muon", "optim.decay_norms=false", "optim.accumulate=2", "augment.mixup=0.4", "augment.cutmix=1"),
    ],
)
def test_resume_is_bit_identical_for_recipe(recipe: tuple[str, ...], tmp_path: Path) -> None:
    small = ("data.dataset=fake", "data.fake_train=96", "data.fake_val=32", "data.image_size=8", "run.epochs=3")
    whole = train_in_process(tmp_path / "whole", *small, *recipe)
    first = min((tmp_path / "whole" / "checkpoints").glob("step-*.pt"))
    resumed = train_in_process(tmp_path / "rest", *small, *recipe, checkpoint=first)
    keys = ("epoch", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "ema_val_loss", "lr")
    assert [[str(getattr(e, key)) for key in keys] for e in resumed] == [
        [str(getattr(e, key)) for key in keys] for e in whole[1:]
    ]
    ends = [torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "rest")]
    for part in ("model", "ema"):
        if ends[0][part] is not None:
            assert all(torch.equal(value, ends[1][part][name]) for name, value in ends[0][part].items())


@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
def test_clip_gradients_returns_norm_without_loss_scale(clip_norm: float) -> None:
    with single_rank_trainer(f"optim.clip_norm={clip_norm}", "precision.amp=O1") as trainer:
        assert trainer.model.scaler.is_enabled()
        trainer.model.scaler.scale(torch.zeros(1))  # creates the scale
        scale = trainer.model.scaler.get_scale()
        for parameter in trainer.model.network.parameters():
            parameter.grad = torch.randn_like(parameter) * scale
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.network.parameters() if p.grad is not None])
        assert trainer.model.clip_gradients().item() == pytest.approx(gradient.norm().item() / scale, rel=1e-4)


def test_step_event_has_gradient_norm_of_its_last_step() -> None:
    events: list[Event] = []
    norms = []
    with single_rank_trainer("run.log_every=2", events=events) as trainer:
        for _ in range(5):
            train_step(trainer)
            norms.append(trainer.log.quantities["grad_norm"].item())
    reported = [event.quantities["grad_norm"] for event in events if isinstance(event, StepEvent)]
    assert reported == [norms[1], norms[3]]
