"""Losses: agreement with torch's, class weights, label smoothing, and user code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from engine.config.loader import resolve_config
from engine.config.user_errors import UserCodeError
from engine.train.loop.evaluation import evaluate
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.classification import balanced_class_weights, softmax_focal_loss
from engine.train.loop.tasks.table import build_task
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer

CPU = torch.device("cpu")
COUNTS = np.array([10, 40, 50])
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0], [1.0, 1.0, 1.0], [-2.0, 0.0, 4.0]])
LABELS = torch.tensor([0, 2, 1, 1])
ONE_HOT = F.one_hot(LABELS, 3).float()


def task(*overrides: str, counts: np.ndarray = COUNTS, device: torch.device = CPU) -> Task:
    labels = np.repeat(np.arange(3), counts)
    return build_task(resolve_config(None, overrides).config, ("a", "b", "c"), device, lambda: labels)


def loss(*overrides: str, logits: Tensor = LOGITS, targets: Tensor = LABELS) -> Tensor:
    return task(*overrides).loss(logits, targets)


def test_cross_entropy_matches_torch_with_label_smoothing() -> None:
    assert torch.equal(loss(), F.cross_entropy(LOGITS, LABELS))
    assert torch.equal(loss("loss.label_smoothing=0.1"), F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))


def test_mse_and_bce_use_one_hot_labels() -> None:
    assert torch.allclose(loss("loss.name=mse"), F.mse_loss(LOGITS, ONE_HOT))
    assert torch.allclose(loss("loss.name=bce"), F.binary_cross_entropy_with_logits(LOGITS, ONE_HOT))


@pytest.mark.parametrize(
    "overrides",
    [
        ("loss.label_smoothing=0.1", "loss.class_weights=balanced", "augment.mixup=0.2", "augment.cutmix=1"),
        ("loss.name=bce", "loss.label_smoothing=0.1"),
    ],
)
def test_validation_loss_of_builtin_losses_is_plain_cross_entropy(overrides: tuple[str, ...]) -> None:
    losses = []
    for extra in ((), overrides):
        with single_rank_trainer("model.name=linear", "data.batch_size=64", "data.val_split=0.1", *extra) as fit:
            result = evaluate(fit)
        assert result is not None
        losses.append(result[0].metrics.loss)
    assert losses[0] == losses[1]
    assert torch.equal(task(*overrides).validation_loss(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS))


def test_balanced_weights_give_classes_equal_weight() -> None:
    weights = balanced_class_weights(COUNTS)
    assert np.allclose(weights * COUNTS, weights[0] * COUNTS[0])
    assert np.isclose((weights * COUNTS).sum() / COUNTS.sum(), 1.0)


def test_focal_loss_lowers_weight_of_well_predicted_images() -> None:
    probability = LOGITS.softmax(1)[range(4), LABELS]
    expected = ((1 - probability) ** 3 * F.cross_entropy(LOGITS, LABELS, reduction="none")).mean()
    assert torch.allclose(loss("loss.name=focal", "loss.focal_gamma=3"), expected)
    assert torch.allclose(loss("loss.name=focal", "loss.focal_gamma=3", targets=ONE_HOT), expected)
    mixed = loss("loss.name=focal", targets=0.3 * ONE_HOT + 0.7 * ONE_HOT.flip(0))
    halves = loss("loss.name=focal"), loss("loss.name=focal", targets=LABELS.flip(0))
    assert torch.allclose(mixed, 0.3 * halves[0] + 0.7 * halves[1])


def test_focal_loss_with_two_classes_is_that_of_torchvision() -> None:
    margin = LOGITS[:, 0] - LOGITS[:, 1]
    expected = sigmoid_focal_loss(margin, ONE_HOT[:, 0], alpha=-1, gamma=2, reduction="mean")
    targets = torch.stack([ONE_HOT[:, 0], 1 - ONE_HOT[:, 0]], 1)
    assert torch.allclose(softmax_focal_loss(LOGITS[:, :2], targets, 2), expected)


@pytest.mark.parametrize("name", ["cross_entropy", "mse", "bce", "focal"])
def test_class_weighted_loss_of_halves_averages_to_whole(name: str) -> None:
    options = (f"loss.name={name}", "loss.class_weights=balanced")
    halves = [loss(*options, logits=LOGITS[part], targets=LABELS[part]) for part in (slice(2), slice(2, 4))]
    assert torch.allclose(loss(*options), (halves[0] + halves[1]) / 2)
    losses = torch.stack([loss(f"loss.name={name}", logits=LOGITS[[n]], targets=LABELS[[n]]) for n in range(4)])
    weights = torch.tensor(balanced_class_weights(COUNTS)[LABELS.numpy()], dtype=torch.float32)
    assert torch.allclose(loss(*options), (losses * weights).mean())


def test_class_weighted_loss_ignores_autocast() -> None:
    criterion = task("loss.name=mse", "loss.class_weights=balanced", counts=np.array([1, 300_000, 300_000])).loss
    expected = criterion(LOGITS, LABELS)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(criterion(LOGITS, LABELS), expected)


USER_LOSSES = """
import torch

def focal(logits, labels):
    probability = torch.softmax(logits, 1).gather(1, labels[:, None]).squeeze(1)
    return (-(1 - probability) ** 2 * probability.log()).mean()

class Scaled:
    def __call__(self, logits, labels):
        return 3 * torch.nn.functional.cross_entropy(logits, labels)

def each(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

class Focal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, self.weights)

class Learned(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

def each_of_many(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none" if len(labels) > 2 else "mean")

def detached(logits, labels):
    return torch.nn.functional.cross_entropy(logits.detach(), labels)

def broken(logits, labels):
    raise ValueError("no way")
"""


@pytest.fixture
def user_loss_code(tmp_path: Path) -> str:
    (tmp_path / "their_losses.py").write_text(USER_LOSSES)
    return f"run.code={tmp_path}"


def test_validation_loss_of_user_is_that_of_training(user_loss_code: str) -> None:
    scaled = task("loss.name=their_losses:Scaled", user_loss_code)
    assert torch.equal(scaled.validation_loss(LOGITS, LABELS), 3 * F.cross_entropy(LOGITS, LABELS))
    assert scaled.validation_loss is scaled.loss


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("each", "invalid-value", ["Tensor of float32, 2; ", "scalar"]),
        ("detached", "invalid-value", ["without a gradient"]),
        ("Learned", "not-supported", [": scale"]),
        ("broken", "user-code-failed", ["labels (N): ValueError: no way"]),
    ],
)
def test_user_loss_is_tried_before_training(user_loss_code: str, name: str, code: str, values: list[str]) -> None:
    with raises_problem(code, "loss.name", f"their_losses:{name}", *values):
        loss(f"loss.name=their_losses:{name}", user_loss_code)


def test_user_loss_is_tried_with_probabilities_of_mixup(user_loss_code: str) -> None:
    with raises_problem("user-code-failed", "loss.name", "their_losses:focal", "probabilities (N x 3)"):
        loss("loss.name=their_losses:focal", user_loss_code, "augment.mixup=0.2")


def test_user_loss_that_returns_no_scalar_in_training_is_named(user_loss_code: str) -> None:
    values = ("their_losses:each_of_many", "Tensor of float32, 4; ", "4 images")
    with raises_problem("invalid-value", "", *values, kind=UserCodeError):
        loss("loss.name=their_losses:each_of_many", user_loss_code)


def test_user_loss_module_moves_to_device(user_loss_code: str) -> None:
    device = torch.device("meta")
    criterion = task("loss.name=their_losses:Focal", user_loss_code, device=device).loss
    assert criterion(LOGITS.to(device), LABELS.to(device)).device == device
    assert torch.allclose(
        loss("loss.name=their_losses:Focal", user_loss_code),
        F.cross_entropy(LOGITS, LABELS, torch.tensor([1.0, 2.0, 3.0])),
    )
