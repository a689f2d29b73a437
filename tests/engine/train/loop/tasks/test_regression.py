"""Regression: losses of scaled numbers as in torch, metrics as in scikit-learn, and training with numbers of a CSV."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.loader import resolve_config
from engine.runs.evaluations import read_evaluations
from engine.runs.event_lines import describe_run_setup
from engine.runs.folder import RunFolder
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import read_trained_checkpoint
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.metrics import Evaluation, Metrics
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.table import build_task
from support.messages import raises_problem
from support.replace import replace
from support.runs.event_factories import make_run_started
from support.runs.in_process import train_in_process

# Random cases for a change, and for a night.
RANDOM_CASES = pytest.mark.parametrize("cases", [100, pytest.param(2000, marks=pytest.mark.nightly)])

CPU = torch.device("cpu")
TABLE = ("data.dataset=csv", "data.path=labels.csv")
NUMBERS = torch.tensor([[100.0, 7.0], [300.0, 7.0]])
LOGITS = torch.tensor([[0.5, 2.0], [-3.0, 0.0]])


def regression(*overrides: str) -> Task:
    config = resolve_config(None, ["task.name=regression", *TABLE, *overrides]).config
    return build_task(config, ("x", "y"), CPU, NUMBERS.numpy)


def score(predicted: Tensor, targets: Tensor) -> Evaluation:
    evaluation = Evaluation(Metrics(0.0, None, 0, len(targets)), None, [], [])
    return regression().score(evaluation, (predicted, targets), selects=True)


@pytest.mark.parametrize(("name", "function"), [("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.huber_loss)])
def test_loss_is_that_of_torch_on_scaled_numbers(name: str, function: object) -> None:
    # Numbers that are all equal are not divided by their standard deviation of 0.
    scaled = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    assert callable(function)
    assert torch.equal(regression(f"loss.name={name}").loss(LOGITS, NUMBERS), function(LOGITS, scaled))


def test_equal_numbers_are_not_scaled_by_the_rounding_of_their_mean() -> None:
    numbers = np.full((241, 1), 0.1, np.float32)
    config = resolve_config(None, ["task.name=regression", *TABLE]).config
    assert build_task(config, ("x",), CPU, lambda: numbers).state["std"] == [1]


@pytest.mark.parametrize(("overrides", "lr"), [((), 0.005), (("optim.lr=0.05",), 0.05), (("optim.name=adamw",), 0.001)])
def test_default_learning_rate_is_small_for_sgd(overrides: tuple[str, ...], lr: float) -> None:
    assert resolve_config(None, ["task.name=regression", *TABLE, *overrides]).config.optim.lr == lr


def test_predictions_are_in_the_unit_of_the_targets() -> None:
    task = regression()
    assert torch.allclose(task.activate(task.scaled(NUMBERS)), NUMBERS)
    assert torch.equal(task.activate(LOGITS), torch.tensor([[250.0, 9.0], [-100.0, 7.0]]))


@RANDOM_CASES
def test_metrics_match_scikit_learn(cases: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    generator = torch.Generator().manual_seed(0)
    for number in range(cases):
        predicted, targets = 100 * torch.randn(2, 2 + number % 40, 1 + number % 3, generator=generator)
        if number % 10 == 0:
            targets[:, 0] = 3
        if number % 20 == 0:
            predicted[:, 0] = 3
        scored = score(predicted, targets)
        pair = targets.double(), predicted.double()
        expected = {
            "mae": metrics.mean_absolute_error(*pair),
            "rmse": metrics.root_mean_squared_error(*pair),
            "r2": metrics.r2_score(*pair),
        }
        assert scored.own == pytest.approx(expected, rel=1e-9)
        assert scored.per_class == pytest.approx(metrics.mean_absolute_error(*pair, multioutput="raw_values").tolist())


@pytest.mark.parametrize(
    ("override", "location", "text"),
    [
        ("augment.cutmix=1", "augment.cutmix", "use augment.mixup"),
        ("loss.name=cross_entropy", "loss.name", "use auto, mse, l1, huber or your own"),
        ("run.monitor=accuracy", "run.monitor", "mae, rmse, r2"),
        ("eval.metrics=macro_recall", "eval.metrics", "macro_recall"),
    ],
)
def test_what_regression_does_not_have_is_refused(override: str, location: str, text: str) -> None:
    code = "unknown-value" if location == "run.monitor" else "conflict"
    with raises_problem(code, location, text):
        regression(override)


def test_run_chooses_its_best_epoch_by_mae_and_keeps_the_scale(
    tmp_path: Path, numbers_of_digits: tuple[str, ...]
) -> None:
    recipe = ("task.name=regression", *numbers_of_digits, "model.name=linear", "augment.mixup=0.1", "model.ema=0.9")
    recipe = (*recipe, "optim.name=adam", "optim.lr=0.01")
    epochs = train_in_process(tmp_path / "run", *recipe)
    assert {(epoch.val_accuracy, epoch.train_accuracy, epoch.val_top5) for epoch in epochs} == {(None, None, None)}
    errors = [epoch.ema_metrics["mae"] for epoch in epochs]
    assert errors[-1] < errors[0]
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert saved["best_accuracy"] == min(errors)
    assert saved["task"]["mean"] == pytest.approx([450], abs=50)
    assert saved["task"]["std"] == pytest.approx([287], abs=30)
    stored = read_evaluations(tmp_path / "run" / "evaluation.json")
    assert np.nanmean(stored.best.accuracies()) == pytest.approx(min(errors))
    evaluated = evaluate_checkpoint(read_trained_checkpoint(RunFolder(tmp_path / "run")))
    assert evaluated.evaluation.own["mae"] == pytest.approx(min(errors))
    assert evaluated.images_per_class == [64]


@pytest.mark.parametrize(("count", "text"), [(1, ", 1 number, "), (2, ", 2 numbers, ")])
def test_start_of_a_run_says_what_it_predicts(count: int, text: str) -> None:
    assert text in describe_run_setup(replace(make_run_started(), classes=count, outputs="numbers"))


def test_numbers_of_other_data_take_the_order_of_the_model() -> None:
    task, labels = regression(), np.array([[1.0, 2.0]], np.float32)
    assert task.map_labels(labels, np.array([1, 0])).tolist() == [[2.0, 1.0]]
    with raises_problem("bad-label", "data.path", "no numbers for y"):
        task.map_labels(labels[:, :1], np.array([0]))


def test_resumed_run_equals_one_that_was_not_stopped(tmp_path: Path, numbers_of_digits: tuple[str, ...]) -> None:
    recipe = ("task.name=regression", *numbers_of_digits, "model.name=linear", "run.epochs=2")
    whole = train_in_process(tmp_path / "whole", *recipe)
    train_in_process(tmp_path / "part", *recipe[:-1], "run.epochs=1")
    checkpoint = tmp_path / "part" / "checkpoints" / "last.pt"
    [rest] = train_in_process(tmp_path / "part", *recipe, checkpoint=checkpoint)
    assert (rest.train_loss, rest.val_loss, rest.metrics) == (
        whole[1].train_loss,
        whole[1].val_loss,
        whole[1].metrics,
    )
