"""Convert the events of a journal to rows of metrics, one for each step, in increasing order of steps.

`engine.report.sync.run_sync` sends the rows. A row is a function of the journal alone, so a row that is sent twice is
equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from engine.runs.events import EpochEvent, Event, GpuEvent, RunResumed, RunStarted, StepEvent
from engine.runs.metrics import METRICS, Taken, Unit
from engine.runs.records import GpuSample

T = TypeVar("T")

MAX_GPUS = 64
# Readings of a GPU, and the names of their metrics behind `gpu/N/`.
GPU_METRICS = {
    "util": "util_percent",
    "sm_active": "sm_active_percent",
    "tensor_active": "tensor_active_percent",
    "memory_used": "memory_used_bytes",
    "temperature": "temperature_celsius",
    "power": "power_watts",
}


@dataclass
class Row:
    """Metrics at one global step, counted from 1; `time` is in Unix seconds. A value may be NaN."""

    step: int
    time: float
    metrics: dict[str, float] = field(default_factory=dict)


def read_rows(events: Iterable[Event], resumed_from: Iterable[int], *, ended: bool) -> Iterator[Row]:
    """Yield the rows of a journal whose sessions after the first continue from the steps `resumed_from`.

    Steps that a later session repeats are skipped. Unless the run has ended, the latest row is kept back: the metrics
    of its epoch may follow.
    """
    resumes = [*resumed_from, math.inf]
    row: Row | None = None
    epochs: list[EpochEvent] = []
    gpus: list[GpuSample] = []
    gpu_numbers: dict[str, int] = {}
    for event in events:
        match event:
            case RunStarted():
                resumes = resumes[isinstance(event, RunResumed) :]
                gpu_numbers = {uuid: number for number, uuid in enumerate(event.devices[:MAX_GPUS])}
                gpus = []
            case GpuEvent():
                gpus = event.gpus
            case EpochEvent() if event.step <= min(resumes):
                epochs.append(event)
            case StepEvent():
                for step, loss in enumerate(event.losses, event.step - len(event.losses) + 1):
                    # The first event of a session repeats the steps whose losses were in the checkpoint.
                    if (row.step if row is not None else 0) < step <= min(resumes):
                        if row is not None:
                            yield _with_epochs(row, epochs, row.step)
                        row = Row(step, event.time, {"train/loss": _number(loss)})
                if row is not None and row.step == event.step:
                    row.metrics |= _step_metrics(event) | _gpu_metrics(gpus, gpu_numbers)
                    gpus = []
    if ended and epochs and row is None:
        # All sessions have only evaluated.
        row = Row(max(epochs[-1].step, 1), epochs[-1].time)
    if ended and row is not None:
        # The losses of the last steps may be lost.
        yield _with_epochs(row, epochs, math.inf)


def _with_epochs(row: Row, epochs: list[EpochEvent], until: float) -> Row:
    """Move the metrics of the epochs that ended by a step into the row. They may follow its losses."""
    while epochs and epochs[0].step <= until:
        row.metrics |= _epoch_metrics(epochs.pop(0))
    return row


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _gpu_metrics(samples: Iterable[GpuSample], numbers: dict[str, int]) -> dict[str, float]:
    return {
        f"gpu/{numbers[uuid]}/{metric}": reading
        for sample in samples
        if (uuid := str(sample.uuid)) in numbers
        for name, metric in GPU_METRICS.items()
        if (reading := getattr(sample, name)) is not None
    }


def _step_metrics(event: StepEvent) -> dict[str, float]:
    return {
        "train/lr": _number(event.lr),
        "train/images_per_second": event.images_per_second,
        "train/data_wait": event.data_wait,
        **{f"train/{key}": _number(value) for key, value in event.quantities.items()},
    }


def _epoch_metrics(epoch: EpochEvent) -> dict[str, float]:
    """Return the metrics of an epoch by name: `val/` and `ema/` for those of validation, `epoch/` for the others."""
    metrics = {"train/epoch": float(epoch.epoch)}
    for key, metric in METRICS.items():
        # At an epoch, the best metrics are those of the trained or of the EMA weights.
        if (
            metric.epoch is None
            or metric.taken in (Taken.BEST, Taken.LOWEST)
            or (key.startswith("ema_") and epoch.ema is None)
        ):
            continue
        value = metric.epoch(epoch)
        if value is not None or metric.unit is Unit.SCORE:
            metrics[_epoch_name(key)] = _number(value)
    for part, scores in (("val", epoch.val), ("ema", epoch.ema)):
        own = {} if scores is None else scores.metrics
        metrics |= {f"{part}/metrics/{name}": _number(value) for name, value in own.items()}
    return metrics


def _epoch_name(key: str) -> str:
    for prefix, part in (("val_", "val"), ("ema_val_", "ema")):
        if key.startswith(prefix):
            return f"{part}/{key.removeprefix(prefix)}"
    return f"epoch/{key}"


def _number(value: float | None) -> float:
    """Return NaN for a value that is not finite, as the services draw it."""
    return math.nan if value is None else float(value)
