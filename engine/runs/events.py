"""The typed events of a run, and the journal that they are appended to and read from.

The journal is JSON lines, one event each: `type`, `time` (Unix seconds), then the event's own fields. A reader passes
over types and fields that it does not know and over a torn last line.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import ClassVar

from engine.runs.records import GpuSample, RankDevice, RankEpochTiming, RankPeakMemory

JOURNAL_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """`time` is when the event happened, in Unix seconds."""

    type: ClassVar[str]
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The ranks are set up and training begins. The first event of a run, once. `devices` are UUIDs or "cpu", one a
    rank; `ranks` has an entry for each device of each rank. A rank has `cores` of the CPU, and its images come
    by `pipeline`, `batch_size` at once. `least_step` is how many seconds a forward and backward pass of `least_images`
    took on rank 0, also of a model that is `compiled` without that; `flops` are the floating-point operations of both
    for one image, and `peak_tflops` is what all GPUs of the run together could do in a second at its precision: NaN
    where that is not known, as on the CPU."""

    type: ClassVar[str] = "run_started"
    format: int = JOURNAL_FORMAT
    name: str
    host: str
    world_size: int
    devices: list[str]
    backend: str
    epochs: int
    global_batch: int
    steps_per_epoch: int
    train_images: int
    val_images: int
    classes: int
    parameters: int
    workers: int
    versions: dict[str, str]
    ranks: list[RankDevice] = field(default_factory=list)
    trainable: int = -1
    """Of the parameters; -1 where that was not told."""
    pipeline: str = ""
    """How images reach the model: memory, stream or fixed; "" where that was not told."""
    pipeline_why: str = ""
    batch_size: int = 0
    cores: int = 0
    least_step: float = math.nan
    least_images: int = 0
    compiled: bool = False
    flops: float = math.nan
    peak_tflops: float = math.nan


@dataclass(frozen=True, kw_only=True)
class RunResumed(RunStarted):
    """Training goes on after step `from_step`; what earlier lines say of later steps no longer holds."""

    type: ClassVar[str] = "run_resumed"
    from_step: int


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """Every `run.log_every` steps. `losses` are those of each step since the event before, averaged over the ranks;
    `lr` is the learning rate of the last; `data_wait` is the share of the time that rank 0 waited for data."""

    type: ClassVar[str] = "step"
    step: int
    epoch: int
    losses: list[float]
    lr: float
    images_per_second: float
    data_wait: float


@dataclass(frozen=True, kw_only=True)
class EpochEvent(Event):
    """An epoch is trained and evaluated. `step` is its last one; `skipped` counts the steps that were left out so far,
    because a loss or a gradient was not finite; `unread` the images of this epoch that could not be read;
    `images_per_second` is that of training, over all ranks. `val_top5` is the share of images whose class is among the
    five likeliest; the `ema` numbers are those of the averaged weights, NaN without them; `data_wait` is the share of
    the training time that the ranks waited for data, on average. `memory` and `work` have an entry for each rank, but
    `memory` none on the CPU."""

    type: ClassVar[str] = "epoch"
    epoch: int
    step: int
    train_loss: float
    train_accuracy: float
    val_loss: float
    val_accuracy: float
    lr: float
    seconds: float
    images_per_second: float
    skipped: int = 0
    unread: int = 0
    val_top5: float = math.nan
    ema_val_loss: float = math.nan
    ema_val_accuracy: float = math.nan
    memory: list[RankPeakMemory] = field(default_factory=list)
    data_wait: float = math.nan
    work: list[RankEpochTiming] = field(default_factory=list)

    @property
    def selection_accuracy(self) -> float:
        """By which the best epoch is chosen: of the averaged weights where there are such. -1 where it is no number."""
        for accuracy in (self.ema_val_accuracy, self.val_accuracy):
            # What was no number is None in a journal.
            if accuracy is not None and math.isfinite(accuracy):
                return accuracy
        return -1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """`path` is relative to the run's folder; `asked` says that someone asked for it."""

    type: ClassVar[str] = "checkpoint"
    path: str
    step: int
    epoch: int
    best: bool = False
    asked: bool = False


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    type: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True, kw_only=True)
class ControlEvent(Event):
    """A request was taken, and what came of it."""

    type: ClassVar[str] = "control"
    request: str
    by: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class RunPaused(Event):
    """All ranks hold after `step`, until they are asked to go on or to stop."""

    type: ClassVar[str] = "paused"
    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class RunContinued(Event):
    """All ranks go on after `step`, where they held."""

    type: ClassVar[str] = "continued"
    step: int
    epoch: int


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """`cause` is one sentence; `traceback` may be empty, as when a signal ended the rank; `repeats` says that the same
    would come of another try; `lost_peer` that the rank only could not reach another one."""

    type: ClassVar[str] = "rank_failed"
    rank: int
    device: str
    cause: str
    traceback: str = ""
    repeats: bool = False
    lost_peer: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """`state` is finished, stopped or failed; `message` says why where it is not finished."""

    type: ClassVar[str] = "run_finished"
    state: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class RunStarting(Event):
    """The run has its folder, and its ranks are being set up, which takes a while. For who waits at the terminal; the
    journal begins with `run_started`."""

    type: ClassVar[str] = "starting"
    name: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class WaitingForGpus(Event):
    """The GPUs that were asked for are not free; `message` says why. For who waits at the terminal."""

    type: ClassVar[str] = "waiting"
    message: str


@dataclass(frozen=True, kw_only=True)
class BatchSizeFound(Event):
    """What `data.batch_size: auto` came to, and why. For who waits at the terminal; the run's config has the number."""

    type: ClassVar[str] = "batch_found"
    message: str


@dataclass(frozen=True, kw_only=True)
class GpuEvent(Event):
    """What the GPUs of a run did when it was looked."""

    type: ClassVar[str] = "gpus"
    gpus: list[GpuSample]


@dataclass(frozen=True, kw_only=True)
class ConfigRejected(Event):
    """What was asked for turned out to be impossible while the ranks were set up: `problems` are pairs of key and
    reason. Told to the owner of the run, who takes the run back; the journal never sees it."""

    type: ClassVar[str] = "refused"
    problems: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class FlushJournal(Event):
    """All that was told before is to be on the disk: a checkpoint follows, and a run that goes on from it must find in
    its journal what came before. Told to the owner of the run; the journal never sees it."""

    type: ClassVar[str] = "flush"


EVENT_TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        RunStarted,
        RunResumed,
        StepEvent,
        EpochEvent,
        GpuEvent,
        CheckpointSaved,
        WarningEvent,
        ControlEvent,
        RunPaused,
        RunContinued,
        RankFailed,
        RunFinished,
        ConfigRejected,
        FlushJournal,
    )
}
