"""SVG snapshots of the screen of the run of a command: live on GPUs, and failed without metrics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.runs.ownership import Ownership
from support.runs.command_folder import make_command_failed, make_command_run, make_gpu_event
from support.screen.demo_app import FROZEN_NOW, demo_app, gpu_uuid
from support.screen.screen_snapshots import Compare, Size, matches_snapshot

ROWS = [
    {"epoch": step / 40, "loss": math.exp(-step / 30) + 0.02 * math.sin(step), "lr": 0.1 * (1 - step / 200)}
    | ({"val_loss": math.exp(-step / 35) + 0.05, "val_accuracy": 1 - math.exp(-step / 25)} if step % 10 == 9 else {})
    for step in range(120)
]
LOG = "2025-10-09 08:00:00  fit-1: process 4200 on 2 x H200 (GPU 0, 1)\n" + "".join(
    f"\x1b[36mINFO\x1b[0m epoch {epoch} \x1b[1;32mval_loss\x1b[0m={math.exp(-epoch / 3):.4f}\n"
    for epoch in range(1, 12)
)
ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB."
TRACEBACK = 'Traceback (most recent call last):\n  File "/work/train.py", line 31, in <module>\n    train(model)\n'

pytestmark = pytest.mark.usefixtures("frozen_environment")


@pytest.mark.parametrize("size", [(80, 24), (160, 48)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_command_run(snap_compare: Compare, size: Size) -> None:
    gpus = [gpu_uuid(0), gpu_uuid(1)]
    readings = [make_gpu_event(FROZEN_NOW - seconds, *gpus) for seconds in range(1000, 0, -5)]
    folder = make_command_run(Path("runs"), "fit-1", *readings, now=FROZEN_NOW, devices=gpus, rows=ROWS, log=LOG)
    owner = Ownership(folder)
    assert matches_snapshot(snap_compare, demo_app(Path("runs"), demo=None, run="fit-1"), size=size)
    owner.release()


def test_failed_command_without_metrics(snap_compare: Compare) -> None:
    failed = make_command_failed(FROZEN_NOW - 60, f"ended with exit code 1: {ERROR}")
    make_command_run(Path("runs"), "fit-2", failed, now=FROZEN_NOW, log=f"{TRACEBACK}{ERROR}\n")
    app = demo_app(Path("runs"), demo=None, run="fit-2")
    assert matches_snapshot(snap_compare, app, size=(80, 24))
