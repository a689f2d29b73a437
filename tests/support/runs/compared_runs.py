"""Runs to compare: losses and accuracies that follow from seed and learning rate alone."""

from __future__ import annotations

import math
from pathlib import Path

from engine.runs.events import Event, RunFinished, StepEvent
from engine.runs.folder import RunFolder
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder, write_config

STEPS_PER_EPOCH, LOG_EVERY = 50, 10


def make_compared_run(root: Path, name: str, *, seed: int = 0, lr: float = 0.1, epochs: int = 4) -> RunFolder:
    """Create a finished run whose curves differ with the seed, and more with the learning rate."""
    folder = make_run_folder(root, name, *compared_events(seed, lr, epochs))
    write_config(folder, {"run": {"name": name, "seed": seed}, "optim": {"lr": lr}})
    return folder


def compared_events(seed: int = 0, lr: float = 0.1, epochs: int = 4) -> list[Event]:
    """Events of such a run: a step takes 0.1 s."""
    start = replace(make_run_started(0.0), epochs=epochs, steps_per_epoch=STEPS_PER_EPOCH)
    events: list[Event] = [start]
    for step in range(LOG_EVERY, epochs * STEPS_PER_EPOCH + 1, LOG_EVERY):
        losses = [_loss(step - LOG_EVERY + index + 1, seed, lr) for index in range(LOG_EVERY)]
        rate = lr * (1 - step / (epochs * STEPS_PER_EPOCH))
        events.append(
            StepEvent(
                time=0.1 * step, step=step, epoch=(step - 1) // STEPS_PER_EPOCH + 1, losses=losses, lr=rate,
                images_per_second=640.0, data_wait=0.01, grad_norm=1.0 + lr + 0.1 * math.sin(step + seed),
            )
        )  # fmt: skip
        if step % STEPS_PER_EPOCH == 0:
            loss, epoch = _loss(step, seed, lr), step // STEPS_PER_EPOCH
            events.append(
                replace(
                    make_epoch(epoch, 1 - 0.4 * loss, 0.1 * step), step=step, train_loss=loss, val_loss=1.1 * loss,
                    images_per_second=600.0 + 100 * lr,
                )
            )  # fmt: skip
    return [*events, RunFinished(time=0.1 * epochs * STEPS_PER_EPOCH + 1, state="finished")]


def _loss(step: int, seed: int, lr: float) -> float:
    return 2 * math.exp(-step * lr / 8) + 0.05 * math.sin(step * (seed + 1)) + 0.1 + 0.02 * seed
