"""Runs with `data.size_schedule`: resume, evaluation, torch.compile, FLOPs, and the search for the batch size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config.loader import resolve_config
from engine.runs.events import Event, RunStarted
from engine.runs.folder import RunFolder
from engine.train.data.plan import batch_bytes
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.distributed.node_plan import plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.inference.evaluate import evaluate_checkpoint
from engine.train.inference.trained_model import read_trained_checkpoint
from engine.train.loop.batch_size import BatchSizeTrials
from engine.train.loop.job import Job
from engine.train.loop.train import run_training
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer, train_in_process, warmup_of

POOLED = """
from torch import nn

def pooled(classes, channels):
    conv = nn.Conv2d(channels, 4, 3, padding=1)
    return nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
"""
FAKE = ("data.dataset=fake", "data.fake_train=72", "data.fake_val=32", "data.batch_size=16", "run.epochs=3")
SCHEDULE = ("data.size_schedule=[6@1,10@2,12@3]", "data.image_size=11")


@pytest.fixture
def recipe(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "pooled_net.py").write_text(POOLED)
    return (*FAKE, *SCHEDULE, f"run.code={tmp_path}", "model.name=pooled_net:pooled")


@pytest.mark.nightly
def test_every_size_is_compiled_before_training(recipe: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    # Four graphs, so the limit has to grow.
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    # Tracing and guards are those of a compiled model; only code generation is skipped, which takes seconds.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    # The context is entered after the trainer is built, which compiles.
    with (
        single_rank_trainer(*recipe, "model.compile=true", "data.drop_last=false") as trainer,
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        assert run_training(trainer, []) == "finished"


def test_model_of_one_size_is_refused_in_one_sentence() -> None:
    values = ("cnn ", " 1x4x4 ", "data.size_schedule")
    with raises_problem("not-supported", "model.name", *values), single_rank_trainer("data.size_schedule=[4@1,8@2]"):
        pass


def test_events_have_size_and_flops_of_epoch(recipe: tuple[str, ...]) -> None:
    events: list[Event] = []
    with single_rank_trainer(*recipe, events=events) as trainer:
        small, large = (warmup_of(trainer).count_flops(size) for size in (6, 12))
        assert warmup_of(trainer).count_flops() == large > 3 * small
        run_training(trainer, [])
    [started] = [event for event in events if isinstance(event, RunStarted)]
    assert (started.train_size, started.input) == (12, "train 6 to 12 (6@1, 10@2, 12@3), evaluate 11 bilinear")


def test_evaluation_of_run_uses_its_evaluation_size(recipe: tuple[str, ...], tmp_path: Path) -> None:
    events = train_in_process(tmp_path / "run", *recipe, "run.epochs=3")
    RunFolder(tmp_path / "run").config.write_text(f"run: {{code: {tmp_path}}}\nmodel: {{name: pooled_net:pooled}}\n")
    checkpoint = read_trained_checkpoint(RunFolder(tmp_path / "run"))
    result = evaluate_checkpoint(checkpoint, ["data.fake_val=32"], "val", "cpu")
    best = max(events, key=lambda epoch: epoch.val_accuracy)
    assert result.evaluation.metrics.loss == pytest.approx(best.val_loss, abs=1e-5)
    with raises_problem("fixed-value", "data.size_schedule"):
        evaluate_checkpoint(checkpoint, ["data.size_schedule=[8@1]"], "val", "cpu")


def test_largest_size_decides_batch_size_and_shared_memory(recipe: tuple[str, ...]) -> None:
    config = resolve_config("digits", [*recipe, "device.gpus=cpu"]).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    assert batch_bytes(16, image_format) == 16 * (3 * 12**2 + 8)
    plan = plan_node(config, [])
    trials = BatchSizeTrials(Job(config, plan, None, False, None), RankInfo(0, 1, 0, 1), source)
    assert trials.fits(2) and trials._trainer is not None
    assert (trials._trainer.data.image_format.train_sizes, trials._trainer.data.image_format.val_size) == ((12,), 11)
    trials.end()
