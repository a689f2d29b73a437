"""Typed events of a run: the documented format of `events.jsonl` and of `gputrain run --json`.

Ranks and the supervisor create them, `engine.runs.journal` converts them to and from JSON, and `engine.runs.history`
derives the state of the run from them.

Each line is one JSON object: `type`, `time`, then the fields of the event. Readers skip unknown types, unknown fields
and an incomplete last line. A value that is not finite is null, and one that is unknown is absent, see
`engine.base.codec`. Losses, accuracies, learning rates and steps are the same for the same seed; durations and
throughput are not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.base.codec import (
    UNSET,
    Count,
    Finite,
    Integer,
    Number,
    Record,
    Seconds,
    UnixTime,
    UnsetType,
    define_record,
    field,
    or_none,
)
from engine.base.errors import Problem
from engine.config.monitor import DEFAULT_MONITOR
from engine.runs.metrics import STEP_QUANTITIES
from engine.runs.records import GpuSample, RankDevice, RankEpochTiming, Scores


class Event(Record, frozen=True, kw_only=True, tag_field="type"):
    """Base class: one thing that happened in a run."""

    time: UnixTime = field(default_factory=lambda: round(time.time(), 3))
    """When the event happened, in Unix seconds."""

    @property
    def type(self) -> str:
        """Name of the event type in the journal."""
        return type_name(type(self))


def type_name(kind: type[Event]) -> str:
    """Return the name of an event type in the journal."""
    return str(kind.__struct_config__.tag)


class AtStep(Event, frozen=True, kw_only=True):
    """Base class: an event after a step."""

    step: Count
    """The latest global step, counted from 1 over all epochs."""
    epoch: Count
    """The epoch of that step or of the one that follows, counted from 1."""


class SessionStarted(Event, frozen=True, kw_only=True):
    """Base class: a session of a run begins, that of a training or of the command of another program."""

    format: Count
    """Version of the journal format."""
    name: str
    """Name of the run and of its folder; "" in a dry run without a name."""
    host: str
    """Host name of rank 0."""
    devices: list[str]
    """UUID of each GPU or MIG instance in the order of `ranks`, or "cpu" for each rank."""
    ranks: list[RankDevice]
    """Process of each rank, one entry for each of its devices. A command is one rank."""
    versions: dict[str, str]
    """Version of gputrain, torch and python, by name."""


class RunStarted(SessionStarted, frozen=True, kw_only=True, tag="run_started"):
    """Training begins: all ranks are set up. Written once per run. Warnings, GPU samples, control requests and failures
    of the ranks' setup can precede it."""

    world_size: Count
    """Number of ranks on all nodes."""
    backend: str
    """Backend of the process group: nccl or gloo."""
    epochs: Count
    """Number of epochs that the run trains for (`run.epochs`)."""
    global_batch: Count
    """Global batch size: images per step over all ranks."""
    steps_per_epoch: Count
    """Optimizer steps per epoch."""
    train_images: Count
    """Number of training images."""
    val_images: Count
    """Number of validation images."""
    test_images: Count = 0
    """Number of test images, which are evaluated once at the end of the run."""
    classes: Count
    """Number of classes, labels or numbers that the model predicts."""
    outputs: str = "classes"
    """What the model predicts: classes, labels or numbers."""
    parameters: Count
    """Number of model parameters, frozen ones included."""
    workers: Count
    """Decode threads or DataLoader workers per rank at the start; 0 if the rank loads images itself."""
    trainable_parameters: Count
    """Number of parameters that receive gradients."""
    image_format: str
    """Sizes and resize filter of the images in training and evaluation, as text."""
    pipeline: str
    """Input pipeline: memory, stream or fixed."""
    pipeline_reason: str
    """Why this input pipeline was chosen, as text."""
    pipeline_auto: bool
    """Whether `data.pipeline` was auto."""
    batch_size: Count
    """Batch size per rank."""
    cores: Count
    """CPU cores per rank."""
    train_size: Count
    """Side of the largest training images in pixels."""
    flops: Finite | UnsetType = UNSET
    """Floating-point operations of the forward and backward pass of one image of `train_size`; absent on CPU."""
    peak_tflops: Number | UnsetType = UNSET
    """Peak TFLOPS of all GPUs of the run together at its precision; absent on CPU and for unlisted GPUs."""
    input: str
    """Size and resize of the model's input in training and evaluation, as text."""
    worker_type: str
    """What `workers` counts: threads or processes."""
    precision: str
    """Precision and memory format, as text."""
    start_method: str
    """How the ranks were started: fork, spawn, torchrun, srun, or env for another launcher; "" in a dry run."""
    monitor: str = DEFAULT_MONITOR
    """Metric of the validation that selects the best epoch (`run.monitor`)."""
    monitor_mode: str = "max"
    """Whether its maximum (max) or its minimum (min) is best."""


class RunResumed(RunStarted, frozen=True, kw_only=True, tag="run_resumed"):
    """Training resumes from a checkpoint. Earlier lines about steps after `from_step` are no longer valid."""

    from_step: Count
    """Step of the checkpoint; training continues with the next one."""


class _StepFields(AtStep, frozen=True, kw_only=True):
    """Training losses since the previous step event. Written every `run.log_every` steps and at the end of the run.

    Also a field for each row of `STEP_QUANTITIES`, of the last step: null if not finite, absent if it was not computed.
    """

    losses: list[Finite | None]
    """Training loss of each step since the previous event, averaged over the ranks; null if not finite."""
    lr: Finite | None
    """Learning rate of the last step; null if not finite."""
    images_per_second: Number
    """Training throughput of all ranks in images/s, without evaluation, checkpoints and pauses."""
    data_wait: Number
    """Share of the time that rank 0 waited for data, 0 to 1."""

    @property
    def quantities(self) -> dict[str, float | None]:
        """The quantities of `STEP_QUANTITIES` that were computed."""
        values = {key: getattr(self, key) for key in STEP_QUANTITIES}
        return {key: value for key, value in values.items() if value is not UNSET}


if TYPE_CHECKING:

    class StepEvent(_StepFields, frozen=True, kw_only=True, tag="step"):
        """The class below, without the fields of the quantities."""
else:
    _QUANTITIES = dict.fromkeys(STEP_QUANTITIES, (Finite | UnsetType | None, UNSET))
    StepEvent = define_record("StepEvent", _QUANTITIES, (_StepFields,), tag="step")


class EpochEvent(AtStep, frozen=True, kw_only=True, tag="epoch"):
    """An epoch was trained and evaluated."""

    train_loss: Finite | None
    """Mean training loss of the epoch. Any loss, accuracy or metric is null if it is not finite, or if the task has
    none."""
    train_accuracy: Finite | None
    """Training accuracy of the epoch, 0 to 1."""
    val_loss: Finite | None
    """Validation loss of the weights that are trained."""
    val_accuracy: Finite | None
    """Validation accuracy of the weights that are trained, 0 to 1."""
    val_top5: Finite | None
    """Top-5 validation accuracy, 0 to 1."""
    ema_val_loss: Finite | UnsetType | None = UNSET
    """Validation loss of the EMA (averaged) weights; absent without them, like all values of the EMA weights."""
    ema_val_accuracy: Finite | UnsetType | None = UNSET
    """Validation accuracy of the EMA (averaged) weights, 0 to 1."""
    ema_val_top5: Finite | UnsetType | None = UNSET
    """Top-5 validation accuracy of the EMA (averaged) weights, 0 to 1."""
    metrics: dict[str, Finite | None]
    """The metrics of the task, `eval.metrics` and `run.monitor` beside loss, accuracy and top-5, by name."""
    ema_metrics: dict[str, Finite | None] | UnsetType = UNSET
    """The user's own metrics of the EMA (averaged) weights."""
    lr: Finite | None
    """Learning rate at the end of the epoch; null if not finite."""
    seconds: Seconds
    """Duration of training and evaluation in seconds, without pauses and the checkpoints written during the epoch."""
    images_per_second: Number
    """Training throughput of all ranks in images/s; 0 if the session only evaluated this epoch."""
    skipped_steps: Count
    """Steps skipped since the start of the run because a loss or gradient was not finite."""
    skipped_images: Count
    """Images of this epoch that could not be read and were skipped."""
    train_size: Count
    """Side of the training images of the epoch in pixels."""
    flops: Finite | UnsetType = UNSET
    """Floating-point operations of the forward and backward pass of one image of this epoch; absent on CPU."""
    data_wait: Number | UnsetType = UNSET
    """Share of the training time that the ranks waited for data, 0 to 1, averaged over the ranks; absent if the session
    only evaluated this epoch."""
    rank_timings: list[RankEpochTiming]
    """Training time of each rank."""

    @property
    def val(self) -> Scores:
        """Scores of the weights that are trained."""
        return Scores(loss=self.val_loss, accuracy=self.val_accuracy, top5=self.val_top5, metrics=self.metrics)

    @property
    def ema(self) -> Scores | None:
        """Scores of the EMA (averaged) weights; None without them."""
        if self.ema_val_loss is UNSET and self.ema_val_accuracy is UNSET:
            return None
        loss, accuracy, top5 = map(or_none, (self.ema_val_loss, self.ema_val_accuracy, self.ema_val_top5))
        return Scores(loss=loss, accuracy=accuracy, top5=top5, metrics=or_none(self.ema_metrics) or {})

    def selected(self, name: str) -> float | None:
        """Return the score that `run.monitor` calls so, of the weights that select the best epoch: of the EMA weights
        if there is one, else of the trained weights."""
        ema = self.ema
        value = None if ema is None else ema.value(name)
        return self.val.value(name) if value is None else value


class FinalTest(Event, frozen=True, kw_only=True, tag="test"):
    """The test images were evaluated, once at the end of training, with the weights of the best epoch."""

    step: Count
    """Global step at the end of training."""
    epoch: Count
    """The best epoch, counted from 1."""
    images: Count
    """Number of test images, without those that could not be read."""
    skipped_images: Count
    """Test images that could not be read."""
    loss: Finite | None
    """Loss of the weights that select the best epoch: the EMA weights if there are any. Null if not finite."""
    accuracy: Finite | None
    """Accuracy of these weights, 0 to 1."""
    top5: Finite | None
    """Top-5 accuracy of these weights, 0 to 1."""
    metrics: dict[str, Finite | None]
    """The metrics of the task, `eval.metrics` and `run.monitor` beside loss, accuracy and top-5, by name."""


class CheckpointSaved(AtStep, frozen=True, kw_only=True, tag="checkpoint"):
    """A checkpoint was written."""

    path: str
    """Path of the file, relative to the run folder."""
    best: bool = False
    """Whether the checkpoint is the new `best.pt`."""
    requested: bool = False
    """Whether a control request caused it."""


class WarningEvent(Event, frozen=True, kw_only=True, tag="warning"):
    """Something the user should know that does not end the run."""

    message: str
    """The warning, as text."""
    code: str
    """Kind of warning, such as no-effect; stays the same when the text changes."""
    cpu_fallback: bool = False
    """Whether it says why the run trains on the CPU although the host has GPUs."""

    @classmethod
    def of(cls, problem: Problem) -> WarningEvent:
        """Create the event of a problem that does not end the run."""
        return cls(message=str(problem), code=problem.code)


class ControlEvent(Event, frozen=True, kw_only=True, tag="control"):
    """A control request was received."""

    request: str
    """Name of the request (stop, checkpoint, pause, continue, profile), or the kind of file that was refused."""
    by: str
    """Sender: user, host and process, or the name of a signal."""
    outcome: str
    """Effect of the request, as text."""


class RunPaused(AtStep, frozen=True, kw_only=True, tag="paused"):
    """All ranks hold after `step` until a continue or stop request arrives."""


class RunContinued(AtStep, frozen=True, kw_only=True, tag="continued"):
    """All ranks continue after a pause."""


class Profiled(Event, frozen=True, kw_only=True, tag="profiled"):
    """A requested profile of training steps ended. These steps were slower than others."""

    step: Count
    """First profiled step; without one, the last global step."""
    epoch: Count
    """Epoch of that step, counted from 1."""
    steps: Count
    """Number of profiled steps."""
    folder: str = ""
    """Folder of the profile, relative to the run folder; "" if none was written."""
    message: str = ""
    """Why there are fewer steps than requested, or why there is no profile, as text."""


class PhaseChanged(AtStep, frozen=True, kw_only=True, tag="phase"):
    """All ranks enter another phase of the run."""

    phase: str
    """training, validating, testing, or saving, which ends with the `checkpoint` event or a warning."""


class RankFailed(Event, frozen=True, kw_only=True, tag="rank_failed"):
    """A rank failed. A restart (`run.max_restarts`) or `run_finished` follows."""

    rank: Integer
    """Number of the rank that failed."""
    device: str
    """UUID of its GPU, or "cpu"."""
    cause: str
    """What happened, in one sentence."""
    code: str
    """Kind of failure, such as out-of-memory; stays the same when the text changes."""
    traceback: str = ""
    """Python traceback; "" if there is none, for example after a signal."""
    repeats: bool = False
    """Whether a restart would fail in the same way."""
    lost_peer: bool = False
    """Whether another rank caused this failure: the connection to it was lost, or a collective timed out."""
    timed_out: bool = False
    """Whether the rank only waited too long for another rank; then `lost_peer` is also true."""


class RunFinished(Event, frozen=True, kw_only=True, tag="run_finished"):
    """The run ended. The last event of a session; absent after a crash."""

    state: str
    """How the run ended: finished, stopped or failed."""
    message: str = ""
    """Result of the run, or why it did not finish."""
    exit_code: Integer | UnsetType = UNSET
    """Exit code of a command, negative for the signal that ended it; absent for a training."""


class WaitingForGpus(Event, frozen=True, kw_only=True, tag="waiting"):
    """The run waits in the queue. Written when it joins and when the reason or its place changes, at most every
    30 s."""

    message: str
    """Which GPUs or runs it waits for, and why."""
    place: Count | UnsetType = UNSET
    """Its place among the runs that wait for GPUs, counted from 1. Absent while it is held or waits for other runs."""


class GpusGranted(Event, frozen=True, kw_only=True, tag="granted"):
    """The run leaves the queue and starts. Absent if it did not wait."""

    devices: list[str]
    """UUIDs of its GPUs; empty for the CPU."""
    seconds: Seconds
    """How long it waited."""


class GpuEvent(Event, frozen=True, kw_only=True, tag="gpus"):
    """Readings of all GPUs of the run at one moment."""

    gpus: list[GpuSample]
    """One record per GPU."""


class ConfigRejected(Event, frozen=True, kw_only=True, tag="refused"):
    """The ranks found the config impossible during setup. Sent to the supervisor, which discards the new run; never
    written to the journal."""

    problems: list[Problem]
    """What the ranks refuse."""


class FlushJournal(Event, frozen=True, kw_only=True, tag="flush"):
    """Request to write all earlier events to disk: a checkpoint follows, and a run that resumes from it needs them in
    its journal. Sent to the supervisor; never written to the journal."""
