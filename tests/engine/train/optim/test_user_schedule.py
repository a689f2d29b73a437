"""The user's own schedule: equal to torch's LambdaLR, refused where it is wrong, and exact after a resume."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.train.optim.lr_schedule import lr_factor
from engine.train.optim.user_schedule import load_user_schedule
from support.messages import raises_problem
from support.runs.in_process import train_in_process

SCHEDULES = """def decay(position):
    return 0.9**position


class Decay:
    def __call__(self, position):
        return 0.9**position


def negative(position):
    return 2.0 - position


def failing(position):
    return 1 / (3 - position)


def nothing(position):
    return None


def text(position):
    return "0.5"


class Unfinished: ...


def huge(position):
    return 10**400
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_schedules", raising=False)
    (tmp_path / "own_schedules.py").write_text(SCHEDULES)
    return tmp_path


def config(code: Path, name: str, *overrides: str) -> Config:
    typed = [f"schedule.name=own_schedules:{name}", f"run.code={code}", *overrides]
    return resolve_config(None, typed).config


@pytest.mark.parametrize(("unit", "name"), [("auto", "decay"), ("step", "Decay")])
def test_user_schedule_equals_lambda_lr(code: Path, unit: str, name: str) -> None:
    steps, own = 5, config(code, name, "run.epochs=4", f"schedule.by={unit}")
    factors = load_user_schedule(own, steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda position: 0.9**position)
    for step in range(1, 4 * steps + 1):
        factor = lr_factor(own.schedule, step, steps, own.run.epochs, factors.__getitem__)
        assert factor == optimizer.param_groups[0]["lr"]
        optimizer.step()
        if unit == "step" or step % steps == 0:
            scheduler.step()


@pytest.mark.parametrize(
    ("name", "problem", "values"),
    [
        ("negative", "invalid-value", [" -1 ", "epoch 3 ", " 0"]),
        ("failing", "user-code-failed", ["epoch 3: ", "ZeroDivisionError: division by zero ({}, line 15)"]),
        ("nothing", "invalid-value", ["None", "epoch 0 ", " 0"]),
        ("text", "invalid-value", [" str ", "epoch 0 ", " 0"]),
        ("Unfinished", "invalid-value", ["__call__"]),
        ("huge", "invalid-value", ["int ", "epoch 0 ", " 0"]),
        ("missing", "not-found", []),
    ],
)
def test_user_schedule_that_does_not_work_is_refused(code: Path, name: str, problem: str, values: list[str]) -> None:
    shown = [value.format(code / "own_schedules.py") for value in values]
    with raises_problem(problem, "schedule.name", f"own_schedules:{name}", *shown):
        load_user_schedule(config(code, name, "run.epochs=5"), 10)


@pytest.mark.nightly
def test_resumed_run_with_user_schedule_equals_uninterrupted_run(code: Path, tmp_path: Path) -> None:
    recipe = ("schedule.name=own_schedules:decay", f"run.code={code}", "run.epochs=3", "schedule.warmup_epochs=0")
    whole = train_in_process(tmp_path / "whole", *recipe, "checkpoint.every_epochs=1", "checkpoint.keep=9")
    first = min((tmp_path / "whole" / "checkpoints").glob("step-*.pt"))
    resumed = train_in_process(tmp_path / "resumed", *recipe, checkpoint=first)
    fields = ("epoch", "train_loss", "val_loss", "lr")
    rows = [[[getattr(epoch, field) for field in fields] for epoch in run] for run in (whole, resumed)]
    assert rows[1] == rows[0][-len(rows[1]) :] and 0 < len(rows[1]) < 3
    assert [epoch.lr / whole[0].lr for epoch in whole] == pytest.approx([1.0, 0.9, 0.81])
