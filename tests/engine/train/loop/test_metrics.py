"""Metrics of an evaluation, and the evaluation file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.base.codec import write_record
from engine.runs.evaluations import EvaluationFile, SparseConfusion, read_evaluations
from engine.runs.monitor import monitor_of
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.metrics import (
    MAX_CONFUSION_CLASSES,
    ClassAccumulator,
    Evaluation,
)
from support.runs.in_process import train_in_process

# Random cases for a change, and for a night.
RANDOM_CASES = pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.nightly)])

CPU = torch.device("cpu")


def evaluation_of(logits: torch.Tensor, labels: torch.Tensor, classes: int) -> Evaluation:
    accumulator = ClassAccumulator(CPU, classes)
    for part in (slice(0, 7), slice(7, None)):
        accumulator.add(F.cross_entropy(logits[part], labels[part]), logits[part], labels[part])
    return accumulator.all_reduce()


def test_evaluation_matches_whole_dataset_metrics_across_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 7, generator=generator)
    labels = torch.randint(0, 6, (40,), generator=generator)
    evaluation, predicted = evaluation_of(logits, labels, 7), logits.argmax(1)
    assert evaluation.metrics.loss == pytest.approx(F.cross_entropy(logits, labels).item())
    assert evaluation.metrics.accuracy == (predicted == labels).sum().item() / 40
    in_five = (logits.argsort(1, descending=True)[:, :5] == labels[:, None]).any(1)
    assert evaluation.top5 == in_five.sum().item() / 40
    expected = [[int(((labels == true) & (predicted == column)).sum()) for column in range(7)] for true in range(7)]
    assert evaluation.confusion == expected
    assert evaluation.per_class[:6] == [expected[n][n] / sum(expected[n]) for n in range(6)]
    assert evaluation.per_class[6] is None, "the class has no image"


def test_evaluation_with_many_classes_keeps_only_hits() -> None:
    classes = MAX_CONFUSION_CLASSES + 1
    labels = torch.tensor([0, 0, 5])
    logits = F.one_hot(torch.tensor([0, 1, 5]), classes).float()
    evaluation = evaluation_of(logits, labels, classes)
    assert (evaluation.confusion, evaluation.per_class[0], evaluation.per_class[5]) == ([], 0.5, 1.0)
    few = evaluation_of(logits[:, :6], labels, 6)
    assert evaluation.class_means == few.class_means


@RANDOM_CASES
def test_class_means_match_scikit_learn(cases: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    generator = torch.Generator().manual_seed(0)
    for number in range(cases):
        classes, count = 2 + number % 11, 1 + number % 40
        labels, predicted = torch.randint(0, classes, (2, count), generator=generator)
        means = evaluation_of(F.one_hot(predicted, classes).float(), labels, classes).class_means
        options: dict[str, Any] = {"average": "macro", "zero_division": 0}
        expected = {
            "macro_f1": metrics.f1_score(labels, predicted, **options),
            "macro_precision": metrics.precision_score(labels, predicted, **options),
            "macro_recall": metrics.recall_score(labels, predicted, **options),
            "balanced_accuracy": metrics.balanced_accuracy_score(labels, predicted),
        }
        assert means == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("monitor", ["loss", "macro_f1"])
def test_run_keeps_the_checkpoint_and_evaluation_of_its_monitor(tmp_path: Path, monitor: str) -> None:
    overrides = ("run.epochs=5", "schedule.name=constant", "optim.lr=0.4", f"run.monitor={monitor}")
    epochs = train_in_process(tmp_path, *overrides)
    best = monitor_of(monitor).best_of(epochs)
    assert best is not None and best is not epochs[-1]
    saved = load_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert saved["epoch"] - 1 == saved["best_epoch"] == best.epoch
    assert saved["best_accuracy"] == best.selected(monitor)
    assert read_evaluations(tmp_path / "evaluation.json").best.epoch == best.epoch
    assert set(best.metrics) == {monitor} - {"loss"}


def test_evaluation_over_ranks_has_classes_on_rank_0_only() -> None:
    labels = torch.tensor([0, 1, 1])
    for rank, confusion in enumerate([[[1, 0], [0, 2]], []]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            accumulator = ClassAccumulator(CPU, 2)
            accumulator.add(torch.tensor(0.5), F.one_hot(labels, 2).float(), labels)
            evaluation = accumulator.all_reduce()
        finally:
            dist.destroy_process_group()
        assert (evaluation.metrics.accuracy, evaluation.top5, evaluation.confusion) == (1.0, 1.0, confusion)


def test_evaluation_file_of_many_classes_stores_only_counts_above_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = torch.arange(5000) % 1000
    evaluation = evaluation_of(F.one_hot((labels + (torch.rand(5000) < 0.2)) % 1000, 1000).float(), labels, 1000)
    stored = evaluation.to_stored(1)
    content = EvaluationFile(classes=tuple(map(str, range(1000))), last=stored, best=stored)
    write_record(tmp_path / "evaluation.json", content)
    assert (tmp_path / "evaluation.json").stat().st_size < 200_000, "24 MB with all counts"
    assert read_evaluations(tmp_path / "evaluation.json").best.read_counts().tolist() == evaluation.confusion
    assert isinstance(stored.confusion, SparseConfusion)
