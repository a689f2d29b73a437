"""Convert the events of a journal to rows of metrics, one for each step, in increasing order of steps.

`engine.sync.run_sync` sends the rows. A row is a function of the journal alone: whoever reads the same journal again
gets the same rows with the same times, so a row that is sent twice is recognized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.runs.events import EpochEvent, Event, GpuEvent, RunFinished, RunResumed, RunStarted, StepEvent
from engine.runs.metrics import METRICS, Aggregate, Unit
from engine.runs.records import GpuSample
from engine.utils.codec import UNSET

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
    metrics: dict[str, float]
    epoch_step: int = 0
    """Step at the end of the latest epoch that the row has metrics of, 0 without one. It may come after `step`."""


@dataclass
class RowBuilder:
    """Turns the events of a journal into rows, in journal order.

    The row of the latest step is kept back until the next losses or the end of the session, because the metrics of its
    epoch may follow. Of steps after `valid_until` there are no rows: a later session of the run repeats them.
    """

    last_step: int = 0
    """Step of the latest row that was returned."""
    valid_until: float = math.inf
    _open_row: Row | None = None
    _epochs: list[EpochEvent] = field(default_factory=list)
    _gpus: list[GpuSample] = field(default_factory=list)
    _gpu_numbers: dict[str, int] = field(default_factory=dict)
    _reported_until: float = 0.0
    """Time of the latest step event, or of the start of the session, in Unix seconds."""

    def add(self, event: Event) -> Iterator[Row]:
        """Yield the rows that the next event completes."""
        match event:
            case RunStarted():
                yield from self._begin_session(event)
            case StepEvent():
                yield from self._add_losses(event)
            case EpochEvent() if event.step <= self.valid_until:
                self._epochs.append(event)
                if self._open_row is not None:
                    self._merge_epochs(self._open_row, self._open_row.step)
            case GpuEvent():
                self._gpus = event.gpus[:MAX_GPUS]
            case RunFinished():
                yield from self.end_session(is_last=event.state == "finished")

    def end_session(self, *, is_last: bool = False) -> Iterator[Row]:
        """Yield what was kept back when a session has ended.

        An epoch can precede the losses of its last steps in the journal. If the session ends between the two, the
        epoch becomes part of the latest row. A session that only evaluates has no losses: if nothing follows it
        (`is_last`), its epoch gets a row of its own at the next step.
        """
        if self._open_row is None and is_last and self._epochs:
            self._open_row = Row(max(self._epochs[-1].step, self.last_step + 1), self._epochs[-1].time, {})
        if self._open_row is not None:
            self._merge_epochs(self._open_row, math.inf)
            yield from self._close_row()

    def _begin_session(self, event: RunStarted) -> Iterator[Row]:
        if isinstance(event, RunResumed):
            if self._open_row is not None and self._open_row.step > event.from_step:
                self._open_row = None
            self._epochs = [epoch for epoch in self._epochs if epoch.step <= event.from_step]
        yield from self.end_session()
        self._gpu_numbers = {uuid: number for number, uuid in enumerate(event.devices[:MAX_GPUS])}
        self._gpus = []
        self._reported_until = event.time

    def _add_losses(self, event: StepEvent) -> Iterator[Row]:
        count = len(event.losses)
        first = event.step - count + 1
        since = min(self._reported_until or event.time, event.time)
        self._reported_until = event.time
        for step, loss in enumerate(event.losses, first):
            known = self.last_step if self._open_row is None else self._open_row.step
            # The first group of a session repeats the steps whose losses were in the checkpoint.
            if not known < step <= self.valid_until:
                continue
            yield from self._close_row()
            time = since + (event.time - since) * (step - first + 1) / count
            self._open_row = Row(step, time, {"train/loss": _number(loss)})
            if step == event.step:
                self._open_row.metrics |= _step_metrics(event) | self._take_gpus()
            self._merge_epochs(self._open_row, step)

    def _merge_epochs(self, row: Row, until_step: float) -> None:
        """Move the metrics of the epochs that ended by `until_step` into a row; the latest one counts."""
        for epoch in [epoch for epoch in self._epochs if epoch.step <= until_step]:
            row.metrics |= _epoch_metrics(epoch)
            row.epoch_step = max(row.epoch_step, epoch.step)
            self._epochs.remove(epoch)

    def _close_row(self) -> Iterator[Row]:
        if self._open_row is not None:
            row, self._open_row = self._open_row, None
            self.last_step = row.step
            yield row

    def _take_gpus(self) -> dict[str, float]:
        """Return the latest readings of the GPUs of the run, each once."""
        samples, self._gpus = self._gpus, []
        return {
            f"gpu/{self._gpu_numbers[uuid]}/{metric}": reading
            for sample in samples
            if (uuid := str(sample.uuid)) in self._gpu_numbers
            for name, metric in GPU_METRICS.items()
            if (reading := getattr(sample, name)) is not None
        }


def _step_metrics(event: StepEvent) -> dict[str, float]:
    metrics = {
        "train/lr": _number(event.lr),
        "train/images_per_second": event.images_per_second,
        "train/data_wait": event.data_wait,
    }
    if event.grad_norm is not UNSET:
        metrics["train/grad_norm"] = _number(event.grad_norm)
    return metrics


def _epoch_metrics(epoch: EpochEvent) -> dict[str, float]:
    """Return the metrics of an epoch by name: `val/` and `ema/` for those of validation, `epoch/` for the others."""
    metrics = {"train/epoch": float(epoch.epoch)}
    for key, metric in METRICS.items():
        # At an epoch, the best metrics are those of the trained or of the EMA weights.
        if metric.epoch is None or metric.aggregate is Aggregate.BEST or (key.startswith("ema_") and epoch.ema is None):
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
