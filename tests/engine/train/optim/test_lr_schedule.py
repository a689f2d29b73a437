"""LR schedules: equal to torch's schedulers at every step, and rejected if incompatible with the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.lr_scheduler import LRScheduler

from engine.config.conflicts import config_conflicts
from engine.config.run_sections import RunConfig
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig, ScheduleConfig
from engine.train.loop.model import PlateauFactor
from engine.train.optim.lr_schedule import lr_factor, scaled_lr, schedule_length_problems
from support.messages import has_problem

STEPS, EPOCHS = 7, 12
EXACT = 1e-12
Make = Callable[[torch.optim.Optimizer, int], LRScheduler]

# Config values of a schedule, and a function that builds torch's equivalent over a number of steps or epochs.
SCHEDULES: dict[str, tuple[dict[str, Any], Make]] = {
    "constant": ({"name": "constant"}, lambda optimizer, length: torch_schedulers.ConstantLR(optimizer, 1.0)),
    "step": (
        {"name": "step", "step_size": 3, "gamma": 0.3},
        lambda optimizer, length: torch_schedulers.StepLR(optimizer, 3, 0.3),
    ),
    "multistep": (
        {"name": "multistep", "milestones": (2, 3, 8), "gamma": 0.2},
        lambda optimizer, length: torch_schedulers.MultiStepLR(optimizer, [2, 3, 8], 0.2),
    ),
    "exponential": (
        {"name": "exponential", "gamma": 0.9},
        lambda optimizer, length: torch_schedulers.ExponentialLR(optimizer, 0.9),
    ),
    "cosine": (
        {"name": "cosine", "final_lr_ratio": 0.1},
        lambda optimizer, length: torch_schedulers.CosineAnnealingLR(optimizer, length, 0.1),
    ),
    "cosine to nothing": (
        {"name": "cosine"},
        lambda optimizer, length: torch_schedulers.CosineAnnealingLR(optimizer, length),
    ),
    "restarts": (
        {"name": "restarts", "restart_every": 3, "final_lr_ratio": 0.1},
        lambda optimizer, length: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 3, 1, 0.1),
    ),
    "longer restarts": (
        {"name": "restarts", "restart_every": 2, "restart_factor": 3},
        lambda optimizer, length: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 2, 3),
    ),
    "polynomial": (
        {"name": "polynomial", "power": 2.5},
        lambda optimizer, length: torch_schedulers.PolynomialLR(optimizer, length, 2.5),
    ),
    "linear": (
        {"name": "linear", "final_lr_ratio": 0.25},
        lambda optimizer, length: torch_schedulers.LinearLR(optimizer, 1.0, 0.25, length),
    ),
    "linear to nothing": (
        {"name": "linear"},
        lambda optimizer, length: torch_schedulers.PolynomialLR(optimizer, length, 1.0),
    ),
    "onecycle": (
        {"name": "onecycle", "peak_at": 0.4, "start_factor": 20, "end_factor": 500},
        lambda optimizer, length: torch_schedulers.OneCycleLR(
            optimizer, 1.0, length, pct_start=0.4, div_factor=20, final_div_factor=500
        ),
    ),
}
# Schedules that start counting at the end of the warmup, like torch's SequentialLR.
AFTER_WARMUP = [
    name for name, (values, _) in SCHEDULES.items() if values["name"] not in ("step", "multistep", "onecycle")
]


def our_rates(**values: Any) -> list[float]:
    schedule = ScheduleConfig(**values)
    return [lr_factor(schedule, step, STEPS, EPOCHS) for step in range(1, STEPS * EPOCHS + 1)]


def torch_rates(
    make: Callable[[torch.optim.Optimizer], LRScheduler], every: int, steps: int = STEPS * EPOCHS
) -> list[float]:
    """Return the learning rate at each step with a torch scheduler that is stepped every `every` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for step in range(1, steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step % every == 0 and step < steps:
            scheduler.step()
    return rates


@pytest.mark.parametrize("by", ["step", "epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_lr_factor_matches_torch_scheduler(name: str, by: str) -> None:
    values, make = SCHEDULES[name]
    length, every = (STEPS * EPOCHS, 1) if by == "step" else (EPOCHS, STEPS)
    expected = torch_rates(lambda optimizer: make(optimizer, length), every)
    assert our_rates(by=by, **values) == pytest.approx(expected, rel=EXACT, abs=0)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 10}, {"warmup_epochs": 2.0}, {"warmup_epochs": 0.5}])
@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_lr_factor_after_warmup_matches_torch_by_step(name: str, warmup: dict[str, Any]) -> None:
    values, make = SCHEDULES[name]
    steps = warmup.get("warmup_steps") or round(warmup["warmup_epochs"] * STEPS)

    def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
        # LinearLR starts at the rate of step 1 and reaches 1.0 at the last warmup step.
        linear = torch_schedulers.LinearLR(optimizer, 1 / steps, 1.0, steps - 1)
        after = make(optimizer, STEPS * EPOCHS - steps)
        return torch_schedulers.SequentialLR(optimizer, [linear, after], [steps])

    assert our_rates(by="step", **warmup, **values) == pytest.approx(torch_rates(sequence, 1), rel=EXACT, abs=0)


@pytest.mark.parametrize("name", AFTER_WARMUP)
def test_lr_factor_after_warmup_matches_torch_by_epoch(name: str) -> None:
    values, make = SCHEDULES[name]
    rates = our_rates(by="epoch", warmup_epochs=2.0, **values)
    after = torch_rates(lambda optimizer: make(optimizer, EPOCHS - 2), STEPS, STEPS * (EPOCHS - 2))
    assert rates[: 2 * STEPS] == pytest.approx([step / (2 * STEPS) for step in range(1, 2 * STEPS + 1)], rel=EXACT)
    assert rates[2 * STEPS :] == pytest.approx(after, rel=EXACT, abs=0)


@pytest.mark.parametrize("name", ["step", "multistep"])
@pytest.mark.parametrize("by", ["step", "epoch"])
def test_lr_factor_step_and_multistep_count_from_start_with_warmup(name: str, by: str) -> None:
    values, _ = SCHEDULES[name]
    plain, warmed = our_rates(by=by, **values), our_rates(by=by, warmup_steps=10, **values)
    assert warmed[10:] == plain[10:]
    assert warmed[:10] == pytest.approx([step / 10 for step in range(1, 11)])


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_scaled_lr_multiplies_by_ranks(scaling: str, factor: float) -> None:
    assert scaled_lr(OptimConfig(lr=0.1, lr_scaling=scaling), 4) == pytest.approx(0.1 * factor)  # type: ignore[arg-type]


# Plateau

LOSSES = [1.0, 0.9, 0.91, 0.92, 0.8999, 0.95, 0.5, 0.51, 0.52, 0.53, 0.54, 0.55, 0.56, 0.57, 0.58, 0.59, 0.6, 0.4, 0.4]
PLATEAU = ScheduleConfig(
    name="plateau", gamma=0.3, patience=1, threshold=1e-3, cooldown=1, final_lr_ratio=0.02, warmup_epochs=1.0
)


def test_plateau_matches_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    scheduler = torch_schedulers.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=1, threshold=1e-3, cooldown=1, min_lr=0.4 * 0.02
    )
    plateau = PlateauFactor(PLATEAU)
    factors, expected = [], []
    for loss in LOSSES:
        plateau.step(loss)
        scheduler.step(loss)
        factors.append(0.4 * plateau.factor)
        expected.append(optimizer.param_groups[0]["lr"])
    assert factors == pytest.approx(expected, rel=EXACT)
    assert factors[-1] == pytest.approx(0.4 * 0.02)
    assert len(set(factors)) > 3


def test_plateau_of_a_maximum_decays_when_the_metric_stops_rising() -> None:
    plateau, falling = PlateauFactor(PLATEAU, "max"), PlateauFactor(PLATEAU, "min")
    for accuracy in (0.5, 0.6, None, 0.7, 0.8):
        plateau.step(accuracy)
        falling.step(accuracy)
    assert plateau.factor == 1 > falling.factor


# Invalid configs


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"name": "cosine", "warmup_epochs": 11.0}, ("out-of-range", "schedule.warmup_epochs", "run.epochs (10)")),
        (
            {"name": "cosine", "warmup_epochs": 1.0, "warmup_steps": 3},
            ("conflict", "schedule.warmup_steps", "schedule.warmup_epochs=1; "),
        ),
        ({"name": "multistep"}, ("missing-value", "schedule.milestones", "[30, 60]")),
        ({"name": "multistep", "milestones": (10, 20)}, ("conflict", "schedule.milestones", " 10; ")),
        ({"name": "multistep", "milestones": (5, 5)}, ("invalid-value", "schedule.milestones", " 1 ")),
        ({"name": "plateau", "by": "step"}, ("conflict", "schedule.by")),
        ({"name": "plateau", "gamma": 1.0}, ("out-of-range", "schedule.gamma", " 1 ")),
    ],
)
def test_schedule_rules_reject_invalid_config(values: dict[str, Any], problem: tuple[str, ...]) -> None:
    config = Config(schedule=ScheduleConfig(**values), run=RunConfig(epochs=10))
    [found] = config_conflicts(config)
    assert has_problem([found], *problem)


def test_schedule_rules_require_two_epochs_for_onecycle_by_epoch() -> None:
    config = Config(schedule=ScheduleConfig(name="onecycle", by="epoch"), run=RunConfig(epochs=1))
    assert [problem.location for problem in config_conflicts(config)] == ["schedule.by"]


def test_schedule_length_problems_reports_settings_beyond_total_steps() -> None:
    late_milestones = ScheduleConfig(name="multistep", by="step", milestones=(84, 90), warmup_steps=85)
    warmup, milestones = schedule_length_problems(late_milestones, STEPS, EPOCHS)
    assert has_problem([warmup], "out-of-range", "schedule.warmup_steps", " 84 ", " 85")
    assert has_problem([milestones], "conflict", "schedule.milestones", " 84 ")
    reached = ScheduleConfig(name="multistep", by="step", milestones=(83,), warmup_steps=84)
    for schedule in (reached, ScheduleConfig(name="multistep", milestones=(11,))):
        assert not [*schedule_length_problems(schedule, STEPS, EPOCHS)]
