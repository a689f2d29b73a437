"""The plan of a run, for `gputrain run --dry-run`."""

from __future__ import annotations

from engine.runs.event_lines import describe_parameters
from engine.runs.events import RunStarted
from engine.utils.text import printable
from tui.tables import fact_lines


def plan_lines(started: RunStarted, fallback: str | None) -> list[str]:
    """Return the lines of a plan. `fallback` is why it uses the CPU although the host has GPUs."""
    rows = {
        "ranks": started.world_size,
        "devices": ", ".join(started.devices),
        **({"reason for CPU": fallback} if fallback else {}),
        "start method": started.start_method,
        "backend": started.backend,
        "precision": started.precision,
        **_input_rows(started),
        "global batch size": started.global_batch,
        "steps per epoch": started.steps_per_epoch,
        "epochs": started.epochs,
        "training images": started.train_images,
        "validation images": started.val_images,
        **({"test images": started.test_images} if started.test_images else {}),
        "classes": started.classes,
        "input": started.input,
        "parameters": describe_parameters(started).replace(" parameters", ""),
    }
    return fact_lines(rows)


def _input_rows(started: RunStarted) -> dict[str, str]:
    """Return the input pipeline, and its workers if it has any."""
    rows = {"input pipeline": printable(f"{started.pipeline} ({started.pipeline_reason})")}
    if started.pipeline == "stream":
        workers = "decode threads" if started.worker_type == "threads" else "DataLoader workers"
        rows[workers] = f"{started.workers} per rank"
    return rows
