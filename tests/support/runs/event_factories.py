"""Journal events with plausible values. Imports neither the config schema nor torch."""

from __future__ import annotations

from typing import Any

from engine.base.codec import FORMAT
from engine.runs.command_events import CommandStarted
from engine.runs.events import EpochEvent, RunResumed, RunStarted, StepEvent

RUN_FIELDS: dict[str, Any] = {
    "format": FORMAT,
    "name": "a",
    "host": "h",
    "world_size": 2,
    "devices": ["cpu", "cpu"],
    "backend": "gloo",
    "epochs": 3,
    "global_batch": 64,
    "steps_per_epoch": 10,
    "train_images": 640,
    "val_images": 100,
    "classes": 10,
    "parameters": 5,
    "trainable_parameters": 5,
    "image_format": "8 x 8 pixels",
    "input": "8 x 8 pixels",
    "pipeline": "stream",
    "pipeline_reason": "set by data.pipeline",
    "pipeline_auto": True,
    "batch_size": 32,
    "cores": 1,
    "workers": 0,
    "worker_type": "threads",
    "train_size": 0,
    "precision": "fp32",
    "start_method": "spawn",
    "ranks": [],
    "versions": {"torch": "2"},
}


def make_run_started(time: float = 0.0) -> RunStarted:
    return RunStarted(time=time, **RUN_FIELDS)


def make_run_resumed(from_step: int, time: float) -> RunResumed:
    return RunResumed(time=time, from_step=from_step, **RUN_FIELDS)


def make_command_started(time: float = 0.0, **fields: Any) -> CommandStarted:
    defaults = {
        "format": FORMAT,
        "name": "a",
        "host": "h",
        "command": "python train.py --lr 0.1",
        "cwd": "/work",
        "pid": 1,
        "run_id": "a-1",
        "devices": ["cpu"],
        "ranks": [],
        "parameters": {"lr": 0.1},
        "versions": {"python": "3"},
    }
    return CommandStarted(time=time, **(defaults | fields))


def make_step(number: int, epoch: int = 1, time: float = 1.0) -> StepEvent:
    return StepEvent(
        time=time,
        step=number,
        epoch=epoch,
        losses=[0.5],
        lr=0.1,
        images_per_second=1.0,
        data_wait=0.0,
        grad_norm=2.0,
    )


def make_epoch(number: int, accuracy: float = 0.5, time: float = 1.0) -> EpochEvent:
    return EpochEvent(
        time=time,
        epoch=number,
        step=number * 10,
        train_loss=1.0 / number,
        train_accuracy=0.4,
        val_loss=1.1 / number,
        val_accuracy=accuracy,
        val_top5=accuracy,
        metrics={},
        lr=0.1,
        seconds=1.0,
        images_per_second=100.0 * number,
        skipped_steps=0,
        skipped_images=0,
        train_size=0,
        rank_timings=[],
    )
