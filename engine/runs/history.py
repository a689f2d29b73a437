"""Current state and summary of a run, derived from its events.

The recorder writes the summary to `summary.json`; the log, `gputrain runs` and the screen read the state.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from engine.runs.bottleneck import (
    STRAGGLER_EPOCHS,
    Bottleneck,
    GpuThrottling,
    diagnose,
    model_flops_utilization,
    update_throttling,
    valid_share,
)
from engine.runs.events import (
    CheckpointSaved,
    ControlEvent,
    EpochEvent,
    Event,
    GpuEvent,
    GpusGranted,
    PhaseChanged,
    RankFailed,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.records import GpuSample
from engine.runs.run_devices import describe_run_devices, fully_trained_epochs, mean_epoch_seconds
from engine.utils import codec
from engine.utils.codec import ENTRIES, UNSET, Count, FileRecord, Finite, Number, Record, Seconds, UnsetType

# Events of the ranks are recorded up to seconds after later ones of the supervisor.
CLOCK_STEP_SECONDS = 10.0
# Readings whose mean is in a summary. Memory and temperature are there with their maximum.
MEAN_READINGS = ("util", "sm_active", "tensor_active", "power")

T = TypeVar("T")


class GpuSummary(Record, frozen=True, kw_only=True):
    """Statistics of one GPU over a run. A reading that the GPU never provided is absent."""

    uuid: str
    host: str
    util: Number | UnsetType = UNSET
    """Mean GPU utilization in percent."""
    sm_active: Number | UnsetType = UNSET
    """Mean SM activity in percent."""
    tensor_active: Number | UnsetType = UNSET
    """Mean tensor core activity in percent."""
    power: Number | UnsetType = UNSET
    """Mean power draw in watts."""
    max_memory_used: Number | UnsetType = UNSET
    """Maximum GPU memory in use, in bytes."""
    max_temperature: Number | UnsetType = UNSET
    """Maximum temperature in degrees Celsius."""
    throttled: list[str] = codec.field(default_factory=list)
    """All throttle reasons."""


class RunSummary(FileRecord, frozen=True, kw_only=True):
    """Content of `summary.json`, rewritten after every epoch and at the end of the run. Unknown values are absent."""

    state: str = ""
    """running, finished, stopped or failed."""
    epochs: Count = 0
    """Number of completed epochs."""
    train_loss: Finite | UnsetType | None = UNSET
    """Training loss of the last epoch; null if not finite, like all losses, accuracies and metrics."""
    val_loss: Finite | UnsetType | None = UNSET
    """Validation loss of the last epoch."""
    val_accuracy: Finite | UnsetType | None = UNSET
    """Validation accuracy of the last epoch, 0 to 1."""
    best_epoch: Count | UnsetType = UNSET
    """Epoch with the highest validation accuracy, of the EMA weights if there are any."""
    best_val_accuracy: Finite | UnsetType = UNSET
    """Validation accuracy of the best epoch, 0 to 1, of the EMA weights if there are any."""
    images_per_second: Number | UnsetType = UNSET
    """Median training throughput of the epochs, in images/s over all ranks."""
    seconds: Seconds = 0.0
    """Duration of all sessions of the run together, in seconds, without pauses."""
    message: str = ""
    """Message of the `run_finished` event."""
    bottleneck: Bottleneck | UnsetType = UNSET
    """What limits the run, see `engine.runs.bottleneck`."""
    data_wait: Number | UnsetType = UNSET
    """Share of the training time of the latest epoch that the ranks waited for data, 0 to 1."""
    mfu: Number | UnsetType = UNSET
    """Model FLOPs utilization of the latest epoch, 0 to 1."""
    gpus: Annotated[list[GpuSummary], ENTRIES] = codec.field(default_factory=list)
    """Statistics of each GPU."""
    metrics: Annotated[dict[str, Finite | None], ENTRIES] = codec.field(default_factory=dict)
    """The user's own metrics of the last epoch, by name."""
    cpu_fallback: str = ""
    """Why the run trained on the CPU although the host has GPUs; "" if it did not."""
    devices: str = ""
    """Devices of the latest session as text, such as `2 x H200 (GPU 0, 3)` or `the CPU`."""
    seconds_per_epoch: Seconds | UnsetType = UNSET
    """Mean duration of the epochs that the latest session trained from start to end, in seconds."""


@dataclass
class GpuStats:
    """Statistics of one GPU over all its samples: means, maxima, throttle reasons, and the ongoing throttling."""

    host: str
    totals: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    throttle_reasons: set[str] = field(default_factory=set)
    throttling: GpuThrottling | None = None

    def add(self, sample: GpuSample, time: float) -> None:
        """Add a sample taken at `time`, in Unix seconds."""
        for name in MEAN_READINGS:
            if (value := getattr(sample, name)) is not None:
                total = self.totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += 1
        for name in ("memory_used", "temperature"):
            if (value := getattr(sample, name)) is not None:
                self.maxima[name] = max(self.maxima.get(name, 0.0), value)
        self.throttle_reasons |= set(sample.throttle_reasons)
        self.throttling = update_throttling(sample, time, self.throttling)

    def mean(self, name: str) -> float | None:
        """Return the mean of a reading; None if the GPU never provided it."""
        total = self.totals.get(name)
        return None if total is None else round(total[0] / total[1], 1)

    def summary(self, uuid: str) -> GpuSummary:
        """Return the entry of `summary.json`."""
        means = {name: mean for name in MEAN_READINGS if (mean := self.mean(name)) is not None}
        maxima = {f"max_{name}": value for name, value in self.maxima.items()}
        return GpuSummary(uuid=uuid, host=self.host, throttled=sorted(self.throttle_reasons), **means, **maxima)


@dataclass
class History:
    """State of a run, updated by `add` with each event in journal order."""

    started: RunStarted | None = None
    epochs: list[EpochEvent] = field(default_factory=list)
    latest_step: StepEvent | None = None
    stopping: bool = False
    paused: bool = False
    failures: list[RankFailed] = field(default_factory=list)
    finished: RunFinished | None = None
    waiting: WaitingForGpus | None = None
    """Why the run waits in the queue; None if it does not."""
    seconds: float = 0.0
    gpus: dict[str, GpuStats] = field(default_factory=dict)
    latest_gpus: GpuEvent | None = None
    cpu_fallback: str = ""
    """Same as `RunSummary.cpu_fallback`."""
    steps_done: int = 0
    """Number of completed optimizer steps, by the latest event that names a step."""
    current_epoch: int = 0
    """Epoch of that event, counted from 1."""
    saving: bool = False
    """Whether a checkpoint is being written."""
    _epoch_phase: str = ""
    _session_epochs: int = 0
    """Number of epochs of earlier sessions in `epochs`."""
    _session_start: float | None = None
    _latest_time: float = 0.0

    def add(self, event: Event) -> None:
        """Update the state with the next event."""
        self._advance(event)
        match event:
            case WaitingForGpus():
                # A session that crashed before the wait does not include it.
                self._end_session()
                self.waiting = event
            case GpusGranted():
                self.waiting = None
            case RunStarted():
                # A session that crashed has no run_finished event; it ends with its last event.
                self._end_session()
                self._session_start = event.time
                self.started, self.finished, self.waiting = event, None, None
                if set(event.devices) != {"cpu"}:
                    self.cpu_fallback = ""
                self.stopping = self.paused = False
                self.failures.clear()
                for stats in self.gpus.values():
                    stats.throttling = None
                if isinstance(event, RunResumed):
                    self.epochs = [epoch for epoch in self.epochs if epoch.step <= event.from_step]
                    if self.latest_step is not None and self.latest_step.step > event.from_step:
                        self.latest_step = None
                self._session_epochs = len(self.epochs)
            case StepEvent():
                self.latest_step = event
            case EpochEvent():
                self.epochs.append(event)
            case GpuEvent():
                self.latest_gpus = event
                for sample in event.gpus:
                    self.gpus.setdefault(str(sample.uuid), GpuStats(sample.host)).add(sample, event.time)
            case WarningEvent(cpu_fallback=True):
                self.cpu_fallback = event.message
            case ControlEvent():
                self.stopping = self.stopping or event.request == "stop"
            case RunPaused():
                self.paused = True
            case RunContinued():
                self.paused = False
            case RankFailed():
                self.failures.append(event)
            case RunFinished():
                self.finished, self.waiting = event, None
        if (
            self._session_start is not None
            and event.time < self._latest_time - CLOCK_STEP_SECONDS
            and not isinstance(event, RunStarted)
        ):
            # The clock of the host was set back during the session.
            self._session_start -= self._latest_time - event.time
        self._latest_time = event.time
        # A pause is no training: the clock stops as at the end of a session.
        if isinstance(event, RunFinished | RunPaused):
            self._end_session()
        elif isinstance(event, RunContinued):
            self._session_start = event.time

    def _advance(self, event: Event) -> None:
        """Update phase, step and epoch."""
        match event:
            case RunResumed():
                self.steps_done = event.from_step
                self.current_epoch = event.from_step // event.steps_per_epoch + 1 if event.steps_per_epoch > 0 else 0
                self._epoch_phase = ""
            case StepEvent() | EpochEvent() | CheckpointSaved() | RunPaused() | RunContinued() | PhaseChanged():
                # A group of steps may be reported after a later event.
                if event.step >= self.steps_done:
                    self.steps_done, self.current_epoch = event.step, max(event.epoch, self.current_epoch)
        if isinstance(event, PhaseChanged) and event.phase != "saving":
            self._epoch_phase = event.phase
        if not isinstance(event, GpuEvent | ControlEvent):
            self.saving = isinstance(event, PhaseChanged) and event.phase == "saving"

    @property
    def latest_time(self) -> float | None:
        """Time of the latest event, in Unix seconds; None before the first one."""
        return self._latest_time or None

    @property
    def phase(self) -> str:
        """What the ranks do: training, validating or saving; "" if the journal does not name it."""
        return "saving" if self.saving else self._epoch_phase

    def _end_session(self) -> None:
        if self._session_start is not None:
            self.seconds += max(self._latest_time - self._session_start, 0.0)
            self._session_start = None

    def _median_images_per_second(self) -> float | None:
        """Return the median throughput, without epochs that a resumed session only evaluated."""
        rates = [epoch.images_per_second for epoch in self.epochs if epoch.images_per_second > 0]
        return round(statistics.median(rates), 1) if rates else None

    @property
    def best(self) -> EpochEvent | None:
        """Epoch with the highest validation accuracy; the first one of equals."""
        known = [epoch for epoch in self.epochs if epoch.selection_accuracy is not None]
        return max(known, key=lambda epoch: epoch.selection_accuracy or 0.0, default=None)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end of the run at the latest speed; None if unknown."""
        if self.started is None or not self.started.steps_per_epoch:
            return None
        remaining_epochs = self.started.epochs - self.steps_done / self.started.steps_per_epoch
        if self.epochs and self.epochs[-1].seconds > 0:
            return max(remaining_epochs, 0.0) * self.epochs[-1].seconds
        if self.latest_step is None or self.latest_step.images_per_second <= 0:
            return None
        return (
            max(remaining_epochs, 0.0)
            * self.started.steps_per_epoch
            * self.started.global_batch
            / self.latest_step.images_per_second
        )

    @property
    def latest_session_epoch(self) -> EpochEvent | None:
        """Latest epoch of this session. Earlier sessions may have used other devices, so their speed does not count."""
        return self.epochs[-1] if self.started and len(self.epochs) > self._session_epochs else None

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the run; None if unknown."""
        session = self.epochs[self._session_epochs :] if self.started else []
        return diagnose(self.started, session[-STRAGGLER_EPOCHS:], self.throttling)

    @property
    def full_session_epochs(self) -> list[EpochEvent]:
        """Epochs that this session trained from start to end."""
        return fully_trained_epochs(self.started, self.epochs[self._session_epochs :])

    @property
    def throttling(self) -> dict[str, GpuThrottling]:
        """Ongoing throttling by GPU UUID."""
        return {uuid: stats.throttling for uuid, stats in self.gpus.items() if stats.throttling is not None}

    @property
    def data_wait(self) -> float | None:
        """Share of the training time that the ranks waited for data in the latest epoch, 0 to 1. During the first epoch
        of a session, the share of rank 0 in its latest steps."""
        return valid_share(
            self.latest_session_epoch.data_wait
            if self.latest_session_epoch
            else self.latest_step.data_wait
            if self.latest_step
            else None
        )

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the latest epoch, 0 to 1."""
        return model_flops_utilization(self.started, self.latest_session_epoch)

    @property
    def total_seconds(self) -> float:
        """Duration of all sessions together, without pauses, up to the latest event."""
        running = self._latest_time - self._session_start if self._session_start is not None else 0.0
        return self.seconds + max(running, 0.0)

    def summary(self) -> RunSummary:
        """Return the content of `summary.json`."""
        last, best = (self.epochs[-1] if self.epochs else None), self.best
        return RunSummary(
            state=self.finished.state if self.finished else "running",
            epochs=last.epoch if last else 0,
            train_loss=last.train_loss if last else UNSET,
            val_loss=last.val_loss if last else UNSET,
            val_accuracy=last.val_accuracy if last else UNSET,
            metrics=last.metrics if last else {},
            best_epoch=best.epoch if best else UNSET,
            best_val_accuracy=_or_unset(best.selection_accuracy if best else None),
            images_per_second=_or_unset(self._median_images_per_second()),
            seconds=round(self.total_seconds, 3),
            message=self.finished.message if self.finished else "",
            bottleneck=_or_unset(self.bottleneck),
            data_wait=_or_unset(self.data_wait),
            mfu=_or_unset(self.mfu),
            gpus=[stats.summary(uuid) for uuid, stats in self.gpus.items()],
            cpu_fallback=self.cpu_fallback,
            devices=describe_run_devices(self.started) if self.started else "",
            seconds_per_epoch=_or_unset(mean_epoch_seconds(self.full_session_epochs)),
        )


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def history_from_events(events: Iterable[Event]) -> History:
    """Return the state of a run after the given events."""
    history = History()
    for event in events:
        history.add(event)
    return history
