"""The user's own metrics: each image once and in order, and errors that do not end a run.

`tests/end_to_end/test_training.py` compares several ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.base.codec import finite
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.events import EpochEvent, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import from_line, to_line
from engine.train.data.sources.open import open_source
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import read_trained_checkpoint
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.own_metrics import OwnMetrics
from engine.train.loop.tasks.table import build_task
from engine.train.loop.trainer import Trainer
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer, train_in_process

METRICS = """
import torch


def order(probabilities, labels):
    # Differs if an image is missing, counted twice or out of order.
    place = torch.arange(1, len(labels) + 1, dtype=torch.float64)
    return {"labels": (place * labels).sum(), "outputs": (place * probabilities[:, 3].double()).sum()}


def accuracy(probabilities, labels):
    assert probabilities.dtype == torch.float32 and abs(float(probabilities.sum(1).mean()) - 1) < 1e-5
    return (probabilities.argmax(1) == labels).float().mean()


def unknown(probabilities, labels):
    return float("nan")


def failing(probabilities, labels):
    if len(labels) > 100:
        raise ValueError("too many images")
    return 1.0


def vector(probabilities, labels):
    return probabilities[0]


def text(probabilities, labels):
    return "0.5"


def huge(probabilities, labels):
    return 10**400


def renamed(probabilities, labels):
    return {"a b": 1.0}


def numbered(probabilities, labels):
    return {"1st": 1.0}


def grouped(probabilities, labels):
    return {"val/gap": 1.0, "_précision@5.top-1": 2.0}


class Endless:
    def update(self, probabilities, labels):
        self.labels = labels

    def compute(self):
        return 1.0


class Accuracy:
    def reset(self):
        self.found = []

    def update(self, probabilities, labels):
        self.found.append((probabilities.argmax(1) == labels).float().mean())

    def compute(self):
        (accuracy,) = self.found
        return accuracy
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_metrics", raising=False)
    (tmp_path / "own_metrics.py").write_text(METRICS)
    return tmp_path


def names(*metrics: str) -> str:
    return "eval.metrics=" + ",".join(f"own_metrics:{name}" for name in metrics)


def test_own_metrics_are_in_the_epoch_event_for_model_and_ema(code: Path, tmp_path: Path) -> None:
    recipe = (names("accuracy", "Accuracy", "unknown", "order"), f"run.code={code}", "run.epochs=2", "model.ema=0.9")
    last = train_in_process(tmp_path / "run", *recipe)[-1]
    labels = open_source(resolve_config("digits").config).get_labels("val")
    assert last.metrics["labels"] == sum(place * int(label) for place, label in enumerate(labels, 1))
    assert last.metrics["accuracy"] == pytest.approx(last.val_accuracy, rel=1e-6)
    assert last.metrics["Accuracy"] == last.metrics["accuracy"]
    assert last.ema_metrics["accuracy"] == pytest.approx(last.ema_val_accuracy, rel=1e-6)
    read = from_line(to_line(last))
    assert isinstance(read, EpochEvent) and read.metrics["unknown"] is None
    assert read.metrics["accuracy"] == last.metrics["accuracy"]
    run = RunFolder(tmp_path / "run")
    run.config.write_text(to_yaml(as_stored(resolve_config("digits", recipe).config)))
    checkpoint = read_trained_checkpoint(run, "last", raw=True)
    alone = evaluate_checkpoint(checkpoint, device="cpu").evaluation.own
    assert {name: finite(value) for name, value in alone.items()} == pytest.approx(last.metrics, rel=1e-5)


def test_failing_metric_is_one_warning_with_the_line_of_the_user(code: Path) -> None:
    events: list[Any] = []
    recipe = (names("failing", "accuracy"), f"run.code={code}", "model.name=linear")
    with single_rank_trainer(*recipe, events=events) as trainer:
        assert isinstance(trainer, Trainer)
        outputs, metrics = (torch.full((359, 10), 0.1), torch.zeros(359, dtype=torch.int64)), trainer.own_metrics
        assert metrics.compute(outputs, trainer.log.warn) == metrics.compute(outputs, trainer.log.warn)
        assert set(metrics.compute(outputs, trainer.log.warn)) == {"accuracy"}
    [warning] = [event for event in events if isinstance(event, WarningEvent)]
    place = f"({code / 'own_metrics.py'}, line 22)"
    assert warning.code == "user-code-failed" and warning.message.startswith("eval.metrics: own_metrics:failing ")
    assert all(value in warning.message for value in ("(N x 10)", f"ValueError: too many images {place}"))


@pytest.mark.parametrize(
    ("metrics", "problem", "values"),
    [
        (["vector"], "invalid-value", ["own_metrics:vector", "Tensor of float32, 10"]),
        (["text"], "invalid-value", ["own_metrics:text", " str "]),
        (["huge"], "invalid-value", ["own_metrics:huge", " int "]),
        (["Endless"], "invalid-value", ["own_metrics:Endless", "reset()"]),
        (["renamed"], "invalid-name", ["own_metrics:renamed", "'a b'"]),
        (["numbered"], "invalid-name", ["own_metrics:numbered", "'1st'"]),
        (["missing"], "not-found", ["own_metrics", "missing"]),
        (["accuracy", "accuracy"], "conflict", ["own_metrics:accuracy", "accuracy"]),
    ],
)
def test_own_metric_that_does_not_work_is_refused(
    code: Path, metrics: list[str], problem: str, values: list[str]
) -> None:
    config = resolve_config("digits", [names(*metrics), f"run.code={code}"]).config
    with raises_problem(problem, "eval.metrics", *values):
        OwnMetrics(config, build_task(config, list("0123456789"), torch.device("cpu")), 100)


def test_own_metrics_of_too_many_probabilities_are_refused(code: Path) -> None:
    config = resolve_config("digits", [names("accuracy"), f"run.code={code}"]).config
    with raises_problem("too-large", "eval.metrics", "50,000", "20,000", "1 GiB"):
        OwnMetrics(config, build_task(config, ["class"] * 20_000, torch.device("cpu")), 50_000)


def test_own_metric_and_its_mode_select_the_best_epoch_of_the_ema_weights(code: Path, tmp_path: Path) -> None:
    monitor = ("run.monitor=Accuracy", "run.monitor_mode=min")
    recipe = (names("Accuracy"), f"run.code={code}", "run.epochs=3", "model.ema=0.9", *monitor)
    epochs = train_in_process(tmp_path / "run", *recipe)
    worst = min(epochs, key=lambda epoch: (epoch.ema_val_accuracy, epoch.ema_val_loss))
    assert worst.epoch == 1
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert (saved["best_epoch"], saved["best_accuracy"]) == (1, worst.ema_metrics["Accuracy"])


@pytest.mark.parametrize("metrics", ["[]", "own_metrics:accuracy"])
def test_monitor_that_the_run_does_not_have_is_refused_with_those_that_it_has(code: Path, metrics: str) -> None:
    overrides = [f"eval.metrics={metrics}", f"run.code={code}", "run.monitor=acuracy"]
    with raises_problem("unknown-value", "run.monitor", "'acuracy'", "loss", "balanced_accuracy", "mean accuracy?"):
        config = resolve_config("digits", overrides).config
        OwnMetrics(config, build_task(config, list("0123456789"), torch.device("cpu")), 100)
