"""Find a learning rate: start a range test of a config on its ranks, and follow its losses.

The test takes the path of a dry run: the preflight, the GPUs and the ranks of a run, but no run folder.
`tui.cli.lr_find` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from engine.config.effects import section_keys
from engine.config.run_sections import CheckpointConfig
from engine.config.training_sections import ScheduleConfig
from engine.launch.launcher import launch
from engine.launch.request import RunRequest
from engine.optim.lr_range import LossCurve, LrRange
from engine.runs.events import Event, StepEvent
from engine.runs.recorder import Listener

UNUSED_KEYS = {
    **dict.fromkeys(
        ("run.name", "run.resume", "run.requeue", "run.max_restarts", "queue.after", *section_keys("checkpoint")),
        "in a learning rate test, which is no run",
    ),
    **dict.fromkeys(
        ("run.epochs", "run.early_stop", "run.early_stop_min_delta", "run.log_every", "model.ema", "optim.lr"),
        "in a learning rate test, which has its own steps and learning rates",
    ),
    **dict.fromkeys(section_keys("schedule"), "in a learning rate test, which has its own learning rates"),
}
"""Config keys that a test does not use, and the reason."""


def range_test_request(request: RunRequest, lr_range: LrRange) -> RunRequest:
    """Return the request of a range test for that of a run.

    Its config lacks what must not affect the test: name and resume of the run, EMA, schedule and checkpoints."""
    run = {"name": None, "resume": False, "requeue": False, "max_restarts": 0, "log_every": 1}
    config = request.config.with_values(run=run, model={"ema": 0.0})
    update = {"schedule": ScheduleConfig(), "checkpoint": CheckpointConfig(every_minutes=0)}
    return replace(request, config=config.model_copy(update=update), dry_run=True, lr_range=lr_range)


def run_lr_find(
    request: RunRequest, lr_range: LrRange, on_step: Callable[[LossCurve], None], listener: Listener
) -> tuple[int, LossCurve]:
    """Run the range test of a request to its end; return the exit code of its ranks, and the curve of the losses.

    `on_step` receives the curve after each step, `listener` all other events. Under torchrun and srun, only rank 0 has
    a curve. Raises UsageError if the range or the request is refused, with nothing left behind."""
    lr_range.check()
    curve = LossCurve(lr_range)

    def receive(event: Event) -> None:
        if not isinstance(event, StepEvent):
            listener(event)
            return
        for loss in event.losses:
            # A loss that is not finite is null between the processes.
            curve.add(math.inf if loss is None or not math.isfinite(loss) else loss)
            on_step(curve)

    return launch(range_test_request(request, lr_range), receive), curve
