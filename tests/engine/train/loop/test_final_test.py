"""Test images are evaluated once, at the end of a run, with the weights of its best epoch, and choose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.runs.events import Event, FinalTest, WarningEvent
from engine.runs.folder import RunFolder
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import read_trained_checkpoint
from engine.train.loop.evaluation import evaluate_test
from engine.train.loop.train import run_training
from support.data.found_folders import write_roboflow
from support.messages import says
from support.runs.in_process import single_rank_trainer


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_roboflow(tmp_path / "photos")


def options(photos: Path, *others: str) -> list[str]:
    data = ["data.dataset=folder", f"data.path={photos}", "data.image_size=16", "data.batch_size=8"]
    return [*data, "model.name=linear", *others]


LAST_IS_BEST = ("run.epochs=3", "run.early_stop=0", "optim.lr=0.05")
EARLIER_IS_BEST = ("run.epochs=4", "optim.lr=2", "optim.momentum=0", "run.seed=1")


@pytest.mark.parametrize(
    "recipe",
    [
        LAST_IS_BEST,
        (*LAST_IS_BEST, "model.ema=0.9"),
        (*LAST_IS_BEST, "precision.amp=bf16", "data.pipeline=stream"),
        EARLIER_IS_BEST,
    ],
)
def test_final_test_is_evaluation_of_best_checkpoint(photos: Path, tmp_path: Path, recipe: tuple[str, ...]) -> None:
    events: list[Event] = []
    (tmp_path / "run").mkdir()
    recipe = (*recipe, "schedule.name=constant")
    with single_rank_trainer(*options(photos, *recipe), folder=tmp_path / "run", events=events) as trainer:
        assert run_training(trainer, []) == "finished"
        trained = {name: value.clone() for name, value in trainer.model.network.state_dict().items()}
    [tested] = [event for event in events if isinstance(event, FinalTest)]
    folder = RunFolder(tmp_path / "run")
    best, last = (read_trained_checkpoint(folder, which) for which in ("best", "last"))
    assert (tested.images, tested.skipped_images, best.step) == (6, 0, 3 * tested.epoch)
    assert tested.epoch < 4, "the last epoch of EARLIER_IS_BEST is not its best"
    result = evaluate_checkpoint(best, [f"data.path={photos / 'test'}"], "all", "cpu").evaluation
    assert tested.loss == pytest.approx(result.metrics.loss, abs=2e-2 if "precision.amp=bf16" in recipe else 1e-6)
    assert tested.accuracy == result.metrics.accuracy
    raw = read_trained_checkpoint(folder, "last", raw=True).weights
    assert last.step == 3 * trainer.config.run.epochs
    assert all(torch.equal(raw[name], value) for name, value in trained.items())


def test_final_test_without_best_checkpoint_is_a_warning(photos: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with single_rank_trainer(*options(photos), folder=tmp_path / "run", events=events) as trainer:
        assert evaluate_test(trainer)
    assert not any(isinstance(event, FinalTest) for event in events)
    [warning] = [event for event in events if isinstance(event, WarningEvent)]
    assert says(f"warning: {warning.message}", "not-readable", "6 test images", "best.pt")
