"""Typed events of a run: the documented format of `events.jsonl` and of `gputrain run --json`.

Ranks and the supervisor create them, `engine.runs.journal` converts them to and from JSON, and `engine.runs.history`
derives the state of the run from them.

Each line is one JSON object: `type`, `time`, then the fields of the event. Readers skip unknown types, unknown fields
and an incomplete last line. JSON has no NaN: a non-finite float is written as null and read back as None. Losses,
accuracies, learning rates and steps are the same for the same seed; durations and throughput are not.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import ClassVar

from engine.runs.records import GpuSample, RankDevice, RankEpochTiming, RankPeakMemory
from engine.utils.errors import Problem

JOURNAL_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class: one thing that happened in a run."""

    type: ClassVar[str]
    """Name of the event type in the journal."""
    time: float = field(default_factory=time.time)
    """When the event happened, in Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Training begins: all ranks are set up. Written once per run. Warnings, GPU samples, control requests and failures
    of the ranks' setup can precede it."""

    type: ClassVar[str] = "run_started"
    format: int = JOURNAL_FORMAT
    """Version of the journal format."""
    name: str
    """Name of the run and of its folder; "" in a dry run without a name."""
    host: str
    """Host name of rank 0."""
    world_size: int
    """Number of ranks on all nodes."""
    devices: list[str]
    """UUID of each GPU or MIG instance in the order of `ranks`, or "cpu" for each rank."""
    backend: str
    """Backend of the process group: nccl or gloo."""
    epochs: int
    """Number of epochs that the run trains for (`run.epochs`)."""
    global_batch: int
    """Global batch size: images per step over all ranks."""
    steps_per_epoch: int
    """Optimizer steps per epoch."""
    train_images: int
    """Number of training images."""
    val_images: int
    """Number of validation images."""
    classes: int
    """Number of classes."""
    parameters: int
    """Number of model parameters, frozen ones included."""
    workers: int
    """Decode threads or DataLoader workers per rank at the start; 0 if the rank loads images itself."""
    versions: dict[str, str]
    """Version of gputrain, torch and python, by name."""
    ranks: list[RankDevice] = field(default_factory=list)
    """Process of each rank, one entry for each of its devices; empty in old journals."""
    trainable: int = -1
    """Number of parameters that receive gradients; -1 in old journals."""
    image_format: str = ""
    """Sizes and resize filter of the images in training and evaluation, as text; "" in old journals."""
    pipeline: str = ""
    """Input pipeline: memory, stream or fixed; "" in old journals."""
    pipeline_why: str = ""
    """Why this input pipeline was chosen, as text; "" in old journals."""
    pipeline_auto: bool = True
    """Whether `data.pipeline` was auto; also True in old journals."""
    batch_size: int = 0
    """Batch size per rank; 0 in old journals."""
    cores: int = 0
    """CPU cores per rank; 0 in old journals."""
    least_step: float = math.nan
    """Seconds of one forward and backward pass of `least_images` images on rank 0, measured without model.compile; null
    if unknown."""
    least_images: int = 0
    """Number of images in the pass that `least_step` times; 0 in old journals."""
    train_size: int = 0
    """Side of the largest training images in pixels, those of the pass that `least_step` times; 0 in old journals."""
    compiled: bool = False
    """Whether the model is compiled (`model.compile`)."""
    flops: float = math.nan
    """Floating-point operations of the forward and backward pass of one image of `train_size`; null on CPU."""
    peak_tflops: float = math.nan
    """Peak TFLOPS of all GPUs of the run together at its precision; null on CPU and for unlisted GPUs."""
    input: str = ""
    """Size and resize of the model's input in training and evaluation, as text; "" in old journals."""
    worker_type: str = ""
    """What `workers` counts: threads or processes; "" in old journals."""
    max_workers: int = 0
    """The most threads to which `workers` may grow while the run trains; 0 in old journals."""
    decoder: str = ""
    """What decodes JPEG files: cpu or gpu; "" in old journals."""
    decoder_why: str = ""
    """Why this decoder was chosen, as text; "" if it had no alternative, and in old journals."""
    precision: str = ""
    """Precision, memory format and NUMA nodes of the ranks, as text; "" in old journals."""
    enlarged_edge: int = 0
    """Shorter edge in pixels of the median image file, if the default input is more than twice as large; else 0."""
    fitting_size: int = 0
    """The `data.image_size` to advise for images of `enlarged_edge`; 0 without."""
    start_method: str = ""
    """How the ranks were started: fork, spawn, torchrun, srun, or env for another launcher; "" in old journals."""


@dataclass(frozen=True, kw_only=True)
class RunResumed(RunStarted):
    """Training resumes from a checkpoint. Earlier lines about steps after `from_step` are no longer valid."""

    type: ClassVar[str] = "run_resumed"
    from_step: int
    """Step of the checkpoint; training continues with the next one."""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """Training losses since the previous step event. Written every `run.log_every` steps and at the end of the run."""

    type: ClassVar[str] = "step"
    step: int
    """Global step of the last loss, counted from 1 over all epochs."""
    epoch: int
    """Epoch of the last loss, counted from 1."""
    losses: list[float]
    """Training loss of each step since the previous event, averaged over the ranks; null if not finite."""
    lr: float
    """Learning rate of the last step."""
    images_per_second: float
    """Training throughput of all ranks in images/s, without evaluation, checkpoints and pauses."""
    data_wait: float
    """Share of the time that rank 0 waited for data, 0 to 1."""
    grad_norm: float = math.nan
    """L2 norm of the gradient of the last step, before clipping; null if not finite and in old journals."""


@dataclass(frozen=True, kw_only=True)
class EpochEvent(Event):
    """An epoch was trained and evaluated."""

    type: ClassVar[str] = "epoch"
    epoch: int
    """Number of the epoch, counted from 1."""
    step: int
    """Global step at the end of the epoch."""
    train_loss: float
    """Mean training loss of the epoch."""
    train_accuracy: float
    """Training accuracy of the epoch, 0 to 1."""
    val_loss: float
    """Validation loss of the weights that are trained."""
    val_accuracy: float
    """Validation accuracy of the weights that are trained, 0 to 1."""
    lr: float
    """Learning rate at the end of the epoch."""
    seconds: float
    """Duration of training and evaluation in seconds, without pauses and the checkpoints written during the epoch."""
    images_per_second: float
    """Training throughput of all ranks in images/s; 0 if the session only evaluated this epoch."""
    skipped: int = 0
    """Steps skipped since the start of the run because a loss or gradient was not finite."""
    unread: int = 0
    """Images of this epoch that could not be read and were skipped."""
    train_size: int = 0
    """Side of the training images of the epoch in pixels; 0 in old journals."""
    flops: float = math.nan
    """Floating-point operations of the forward and backward pass of one image of this epoch; null on CPU and in old
    journals."""
    val_top5: float = math.nan
    """Top-5 validation accuracy, 0 to 1; null in old journals."""
    ema_val_loss: float = math.nan
    """Validation loss of the EMA (averaged) weights; null without them."""
    ema_val_accuracy: float = math.nan
    """Validation accuracy of the EMA (averaged) weights, 0 to 1; null without them."""
    ema_val_top5: float = math.nan
    """Top-5 validation accuracy of the EMA (averaged) weights, 0 to 1; null without them and in old journals."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The user's own metrics (`eval.metrics`) by name; null if not finite."""
    ema_metrics: dict[str, float] = field(default_factory=dict)
    """The user's own metrics of the EMA (averaged) weights; empty without them."""
    memory: list[RankPeakMemory] = field(default_factory=list)
    """Peak GPU memory of each rank; empty on CPU."""
    data_wait: float = math.nan
    """Share of the training time that the ranks waited for data, 0 to 1, averaged over the ranks; null if unknown."""
    work: list[RankEpochTiming] = field(default_factory=list)
    """Training time of each rank; empty in old journals."""

    @property
    def selection_accuracy(self) -> float:
        """Accuracy that selects the best epoch: of the EMA weights if there are any. -1 if it is not finite."""
        for accuracy in (self.ema_val_accuracy, self.val_accuracy):
            # A non-finite value is None after reading a journal.
            if accuracy is not None and math.isfinite(accuracy):
                return accuracy
        return -1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was written."""

    type: ClassVar[str] = "checkpoint"
    path: str
    """Path of the file, relative to the run folder."""
    step: int
    """Global step of the checkpoint."""
    epoch: int
    """Epoch of the checkpoint, counted from 1."""
    best: bool = False
    """Whether the checkpoint is the new `best.pt`."""
    asked: bool = False
    """Whether a control request caused it."""


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something the user should know that does not end the run."""

    type: ClassVar[str] = "warning"
    message: str
    """The warning, as text."""
    code: str
    """Kind of warning, such as no-effect; stays the same when the text changes. "" in old journals."""
    cpu_fallback: bool = False
    """Whether it says why the run trains on the CPU although the host has GPUs."""

    @classmethod
    def of(cls, problem: Problem) -> WarningEvent:
        """Create the event of a problem that does not end the run."""
        return cls(message=str(problem), code=problem.code)


@dataclass(frozen=True, kw_only=True)
class ControlEvent(Event):
    """A control request was received."""

    type: ClassVar[str] = "control"
    request: str
    """Name of the request (stop, checkpoint, pause, continue, profile), or the kind of file that was refused."""
    by: str
    """Sender: user, host and process, or the name of a signal."""
    outcome: str
    """Effect of the request, as text."""


@dataclass(frozen=True, kw_only=True)
class RunPaused(Event):
    """All ranks hold after `step` until a continue or stop request arrives."""

    type: ClassVar[str] = "paused"
    step: int
    """Last global step before the pause."""
    epoch: int
    """Epoch of that step, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class RunContinued(Event):
    """All ranks continue after a pause."""

    type: ClassVar[str] = "continued"
    step: int
    """Last global step before the pause."""
    epoch: int
    """Epoch of that step, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """A requested profile of training steps ended. These steps were slower than others. Absent in old journals."""

    type: ClassVar[str] = "profiled"
    step: int
    """First profiled step; without one, the last global step."""
    epoch: int
    """Epoch of that step, counted from 1."""
    steps: int
    """Number of profiled steps."""
    folder: str = ""
    """Folder of the profile, relative to the run folder; "" if none was written."""
    message: str = ""
    """Why there are fewer steps than requested, or why there is no profile, as text."""


@dataclass(frozen=True, kw_only=True)
class PhaseChanged(Event):
    """All ranks enter another phase of the run. Absent in old journals."""

    type: ClassVar[str] = "phase"
    phase: str
    """training, validating, or saving, which ends with the `checkpoint` event or a warning."""
    step: int
    """Last global step before the change."""
    epoch: int
    """Epoch of the phase, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """A rank failed. A restart (`run.max_restarts`) or `run_finished` follows."""

    type: ClassVar[str] = "rank_failed"
    rank: int
    """Number of the rank that failed."""
    device: str
    """UUID of its GPU, or "cpu"."""
    cause: str
    """What happened, in one sentence."""
    code: str
    """Kind of failure, such as out-of-memory; stays the same when the text changes. "" in old journals."""
    traceback: str = ""
    """Python traceback; "" if there is none, for example after a signal."""
    repeats: bool = False
    """Whether a restart would fail in the same way."""
    lost_peer: bool = False
    """Whether another rank caused this failure: the connection to it was lost, or a collective timed out."""
    timed_out: bool = False
    """Whether the rank only waited too long for another rank; then `lost_peer` is also true."""


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The run ended. The last event of a session; absent after a crash."""

    type: ClassVar[str] = "run_finished"
    state: str
    """How the run ended: finished, stopped or failed."""
    message: str = ""
    """Result of the run, or why it did not finish."""


@dataclass(frozen=True, kw_only=True)
class WaitingForGpus(Event):
    """The run waits in the queue. Written when it joins and when the reason changes, at most every 30 s. Under torchrun
    and srun, it is only shown on the terminal."""

    type: ClassVar[str] = "waiting"
    message: str
    """Which GPUs or runs it waits for, and why."""


@dataclass(frozen=True, kw_only=True)
class GpusGranted(Event):
    """The run leaves the queue and starts. Absent if it did not wait."""

    type: ClassVar[str] = "granted"
    devices: list[str]
    """UUIDs of its GPUs; empty for the CPU."""
    seconds: float
    """How long it waited."""


@dataclass(frozen=True, kw_only=True)
class GpuEvent(Event):
    """Readings of all GPUs of the run at one moment."""

    type: ClassVar[str] = "gpus"
    gpus: list[GpuSample]
    """One record per GPU."""


@dataclass(frozen=True, kw_only=True)
class ConfigRejected(Event):
    """The ranks found the config impossible during setup. Sent to the supervisor, which discards the new run; never
    written to the journal."""

    type: ClassVar[str] = "refused"
    problems: list[list[str]]
    """Pairs of config key and reason."""


@dataclass(frozen=True, kw_only=True)
class FlushJournal(Event):
    """Request to write all earlier events to disk: a checkpoint follows, and a run that resumes from it needs them in
    its journal. Sent to the supervisor; never written to the journal."""

    type: ClassVar[str] = "flush"
