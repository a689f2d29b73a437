"""Learning diagnosis: each fault in its curve and in a real run, and healthy curves just inside the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine.runs.event_lines import event_lines
from engine.runs.events import EpochEvent, Event, RankFailed, RunFinished, RunStarted
from engine.runs.history import history_from_events
from engine.runs.journal import from_line, to_line
from engine.runs.records import LearningFault
from engine.training.train import run_training
from engine.utils.codec import UNSET
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.in_process import single_rank_trainer

GUESS = math.log(10)


def started(**fields: Any) -> RunStarted:
    defaults = {"epochs": 10, "steps_per_epoch": 10, "guessing_loss": GUESS, "warmup_steps": 0}
    return replace(make_run_started(), **(defaults | fields))


def curve(losses: Sequence[float], val_losses: Sequence[float] | None = None, **fields: Any) -> list[EpochEvent]:
    """Epochs of 10 steps with these losses. A field that is a list has a value per epoch."""
    epochs = []
    for index, loss in enumerate(losses):
        own = {key: value[index] if isinstance(value, list) else value for key, value in fields.items()}
        val_loss = loss if val_losses is None else val_losses[index]
        epochs.append(replace(make_epoch(index + 1), train_loss=loss, val_loss=val_loss, **own))
    return epochs


def fault(*events: Event) -> LearningFault | None:
    learning = history_from_events([from_line(to_line(event)) for event in events]).learning
    return None if learning is None else learning.fault


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([6.0, 5.9, 4.7], LearningFault.DIVERGED),
        ([6.0, 5.9, 4.5], None),
        ([1.5, 1.0, 2.2], LearningFault.DIVERGED),
        ([1.5, 1.0, 2.0], None),
        ([0.5, 0.5, 0.5], None),
    ],
)
def test_learning_diagnosis_follows_training_loss(losses: list[float], expected: LearningFault | None) -> None:
    assert fault(started(epochs=len(losses)), *curve(losses)) is expected


def test_task_without_accuracy_is_judged_by_its_loss_alone() -> None:
    without = {"train_accuracy": None, "val_accuracy": None}
    assert fault(started(), *curve([6.0, 5.9, 4.7], **without)) is LearningFault.DIVERGED
    assert fault(started(), *curve([0.9, 0.5, 0.3, 0.2, 0.1], [1.0, 0.8, 0.92, 0.93, 0.95], **without)) is None


ANY_LOSS = st.floats(0, 1e300) | st.just(0.0)


@given(st.lists(st.tuples(ANY_LOSS, ANY_LOSS, st.floats(0, 1), st.floats(0, 1)), max_size=20))
def test_learning_diagnosis_accepts_every_curve(values: list[tuple[float, float, float, float]]) -> None:
    names = ("train_loss", "val_loss", "train_accuracy", "val_accuracy")
    epochs = [
        replace(make_epoch(index), **dict(zip(names, row, strict=True))) for index, row in enumerate(values, start=1)
    ]
    history_from_events([started(epochs=10**9), *epochs]).learning  # noqa: B018 - it raises nothing


def test_warmup_and_few_steps_are_not_judged() -> None:
    epochs = curve([6.0, 5.9, 5.8, 5.7])
    assert fault(started(warmup_steps=11), *epochs) is None
    assert fault(started(warmup_steps=10), *epochs) is LearningFault.DIVERGED
    few = [replace(epoch, step=epoch.epoch * 9) for epoch in epochs[:3]]
    assert fault(started(steps_per_epoch=9), *few) is None


def test_without_loss_of_guessing_the_training_loss_is_not_judged() -> None:
    assert fault(started(guessing_loss=UNSET), *curve([6.0, 5.9, 5.8])) is None
    assert fault(make_run_started(), *curve([6.0, 5.9, 5.8])) is None


@pytest.mark.parametrize(("skipped", "expected"), [(4, None), (5, LearningFault.DIVERGED)])
def test_run_that_skips_half_of_its_steps_has_diverged(skipped: int, expected: LearningFault | None) -> None:
    assert fault(started(), *curve([2.0], skipped_steps=skipped)) is expected


def test_failure_at_a_loss_that_is_not_finite_has_diverged() -> None:
    failure = RankFailed(rank=0, device="cpu", cause="the loss is nan", code="non-finite")
    assert fault(started(), failure) is LearningFault.DIVERGED
    assert fault(started(), replace(failure, code="out-of-memory")) is None


@pytest.mark.parametrize(
    ("val_losses", "train_accuracy", "expected"),
    [
        ([1.0, 0.8, 0.92, 0.93, 0.95], 0.581, LearningFault.OVERFITTING),
        ([1.0, 0.8, 0.91, 0.93, 0.95], 0.581, None),
        ([1.0, 0.8, 0.92, 0.93, 0.95], 0.57, None),
        ([1.0, 0.8, 0.80, 0.81, 0.82], 0.71, LearningFault.OVERFITTING),
        ([1.0, 0.8, 0.80, 0.81, 0.82], 0.69, None),
        ([1.0, 0.8, 0.80, 0.79, 0.78], 0.71, None),
    ],
)
def test_training_far_ahead_of_validation_is_overfitting(
    val_losses: list[float], train_accuracy: float, expected: LearningFault | None
) -> None:
    epochs = curve([0.9, 0.5, 0.3, 0.2, 0.1], val_losses, train_accuracy=train_accuracy, val_accuracy=0.5)
    assert fault(started(), *epochs) is expected


def test_log_and_record_of_a_run_have_the_diagnosis() -> None:
    end = RunFinished(state="finished")
    history = history_from_events([started(), *curve([6.0, 5.9, 5.8]), end])
    learning = history.learning
    assert learning is not None
    assert event_lines(end, history)[0] == learning.message
    assert history.record().learning == learning


# Real runs.


def fault_of_run(*overrides: str, dataset: str = "digits", epochs: int = 4) -> LearningFault | None:
    events: list[Event] = []
    base = (f"data.dataset={dataset}", "data.batch_size=32", f"run.epochs={epochs}")
    with single_rank_trainer(*base, *overrides, events=events, base=None) as trainer:
        assert run_training(trainer, []) == "finished"
    return fault(*events)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("optim.lr=300",), LearningFault.DIVERGED),
        ((), None),
        (("augment.mixup=0.4", "loss.label_smoothing=0.1"), None),
        (("loss.name=mse",), None),
        (("loss.name=bce",), None),
    ],
)
def test_fault_of_real_run_is_named(overrides: tuple[str, ...], expected: LearningFault | None) -> None:
    assert fault_of_run("model.name=linear", *overrides) is expected


@pytest.mark.nightly
def test_network_that_learns_noise_by_heart_overfits(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 8, 8), np.uint8)
    for index, pixels in enumerate(noise):
        folder = tmp_path / ("train" if index < 200 else "val") / f"class{index % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    overrides = (f"data.path={tmp_path}", "data.image_size=8", "model.name=cnn")
    assert fault_of_run(*overrides, dataset="folder", epochs=25) is LearningFault.OVERFITTING
