"""Multi-label: losses as in torch and timm, metrics as in scikit-learn, thresholds, and training with a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from engine.config.loader import resolve_config
from engine.runs.evaluations import read_evaluations
from engine.runs.folder import RunFolder
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import read_trained_checkpoint
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.metrics import Evaluation, Metrics
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.multilabel import DEFAULT_THRESHOLD
from engine.train.loop.tasks.table import build_task
from support.messages import raises_problem
from support.runs.in_process import train_in_process

# Random cases for a change, and for a night.
RANDOM_CASES = pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.nightly)])

CPU = torch.device("cpu")
TABLE = ("data.dataset=csv", "data.path=labels.csv")
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0], [1.0, 1.0, 1.0], [-2.0, 0.0, 4.0]])
TARGETS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def multilabel(num_labels: int, *overrides: str, **state: list[float]) -> Task:
    config = resolve_config(None, ["task.name=multilabel", *TABLE, *overrides]).config
    names = [str(number) for number in range(num_labels)]
    return build_task(config, names, CPU, lambda: TARGETS.numpy().astype(np.uint8), state)


def score(task: Task, probabilities: Tensor, targets: Tensor, *, selects: bool = True) -> Evaluation:
    evaluation = Evaluation(Metrics(0.0, None, 0, len(targets)), None, [], [])
    return task.score(evaluation, (probabilities, targets), selects=selects)


def test_bce_matches_torch_with_the_weight_of_balanced_classes() -> None:
    weight = torch.tensor([1.0, 1.0, 3.0])
    assert torch.equal(multilabel(3).loss(LOGITS, TARGETS), F.binary_cross_entropy_with_logits(LOGITS, TARGETS))
    balanced = multilabel(3, "loss.class_weights=balanced")
    expected = F.binary_cross_entropy_with_logits(LOGITS, TARGETS, pos_weight=weight)
    assert torch.equal(balanced.loss(LOGITS, TARGETS), expected)
    assert torch.equal(balanced.validation_loss(LOGITS, TARGETS), multilabel(3).loss(LOGITS, TARGETS))


def test_label_of_all_images_keeps_a_weight() -> None:
    config = resolve_config(None, ["task.name=multilabel", *TABLE, "loss.class_weights=balanced"]).config
    labels = np.array([[1, 0]] * 4, np.uint8)
    task = build_task(config, ("always", "never"), CPU, lambda: labels)
    targets = torch.tensor([[1.0, 0.0]])
    expected = F.binary_cross_entropy_with_logits(torch.zeros(1, 2), targets, pos_weight=torch.tensor([1 / 3, 3.0]))
    assert torch.allclose(task.loss(torch.zeros(1, 2), targets), expected)


def test_focal_loss_matches_torchvision_with_the_weight_of_balanced_classes() -> None:
    focal = ("loss.name=focal", "loss.focal_gamma=3", "loss.focal_alpha=0.4")
    expected = sigmoid_focal_loss(LOGITS, TARGETS, alpha=0.4, gamma=3)
    assert torch.equal(multilabel(3, *focal).loss(LOGITS, TARGETS), expected.mean())
    balanced = multilabel(3, *focal, "loss.class_weights=balanced").loss(LOGITS, TARGETS)
    assert torch.allclose(balanced, (expected * torch.where(TARGETS > 0, torch.tensor([1.0, 1.0, 3.0]), 1.0)).mean())


def test_asymmetric_loss_and_its_gradient_match_timm() -> None:
    timm = pytest.importorskip("timm.loss").AsymmetricLossMultiLabel()
    soft = torch.cat([TARGETS, 0.3 * TARGETS + 0.7 * TARGETS.flip(0)])
    ours, theirs = (torch.cat([LOGITS, 5 * LOGITS]).requires_grad_() for _ in range(2))
    loss, expected = multilabel(3, "loss.name=asl").loss(ours, soft), timm(theirs, soft)
    assert torch.allclose(loss, expected)
    assert torch.allclose(*torch.autograd.grad(loss, ours), *torch.autograd.grad(expected, theirs))


@RANDOM_CASES
@pytest.mark.filterwarnings("ignore")
def test_metrics_match_scikit_learn(cases: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    generator = torch.Generator().manual_seed(0)
    for number in range(cases):
        labels, count = 1 + number % 5, 2 + number % 40
        # Every other case has equal scores.
        probabilities = torch.rand(count, labels, generator=generator)
        probabilities = (probabilities * 10).round() / 10 if number % 2 else probabilities
        targets = (torch.rand(count, labels, generator=generator) < 0.4).float()
        scored = score(multilabel(labels), probabilities, targets)
        known = targets.any(0).tolist()
        precisions = [
            metrics.average_precision_score(targets[:, label], probabilities[:, label]) if known[label] else None
            for label in range(labels)
        ]
        assert scored.per_class == pytest.approx(precisions, abs=1e-12)
        thresholds = torch.tensor(scored.chosen["thresholds"])
        for label in filter(known.__getitem__, range(labels)):
            # Of the scores of all images, the threshold has the highest F1.
            predicted = (
                probabilities[:, label] >= torch.cat([thresholds[label, None], probabilities[:, label]])[:, None]
            )
            f1 = 2 * (predicted * targets[:, label]).sum(1) / (predicted.sum(1) + targets[:, label].sum())
            assert f1[0] == f1.max()
        predicted, options = (probabilities >= thresholds).int(), dict[str, Any](zero_division=0)
        expected = {
            "mAP": np.mean([precision for precision in precisions if precision is not None] or [np.nan]),
            "macro_f1": metrics.f1_score(targets, predicted, average="macro", **options)
            if labels > 1
            else metrics.f1_score(targets, predicted, **options),
            "micro_f1": metrics.f1_score(targets.flatten(), predicted.flatten(), **options),
        }
        assert scored.own == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_only_the_validation_chooses_thresholds() -> None:
    probabilities, targets = torch.tensor([[0.2], [0.3], [0.1]]), torch.tensor([[1.0], [1.0], [0.0]])
    task = multilabel(1)
    assert score(task, probabilities, targets, selects=False).own["macro_f1"] == 0
    validated = score(task, probabilities, targets)
    assert validated.chosen["thresholds"] == pytest.approx([0.15])
    task.adopt(validated)
    tested = score(task, probabilities, targets, selects=False)
    assert (tested.own["macro_f1"], tested.chosen) == (1, validated.chosen)


def test_state_that_does_not_match_the_labels_is_refused() -> None:
    with raises_problem("damaged", "checkpoint", "2 of thresholds", "3 outputs"):
        multilabel(3, thresholds=[0.5, 0.5])


def test_run_chooses_its_best_epoch_by_map_and_keeps_thresholds(
    tmp_path: Path, labels_of_digits: tuple[str, ...]
) -> None:
    epochs = train_in_process(tmp_path / "run", "task.name=multilabel", *labels_of_digits, "model.name=linear")
    assert {(epoch.val_accuracy, epoch.train_accuracy, epoch.val_top5) for epoch in epochs} == {(None, None, None)}
    precisions = [epoch.metrics["mAP"] for epoch in epochs]
    assert precisions[-1] > precisions[0]
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert saved["best_accuracy"] == max(precisions)
    stored = read_evaluations(tmp_path / "run" / "evaluation.json")
    assert list(stored.best.thresholds) == saved["task"]["thresholds"] != [DEFAULT_THRESHOLD] * 2
    assert (stored.classes, stored.best.top1, stored.best.read_counts().size) == (("odd", "small"), None, 0)
    assert np.nanmean(stored.best.accuracies()) == pytest.approx(max(precisions))
    evaluated = evaluate_checkpoint(read_trained_checkpoint(RunFolder(tmp_path / "run"))).evaluation
    assert (evaluated.own, evaluated.chosen) == (stored.best.metrics, saved["task"])
