"""The record of a run, `summary.json`: its state, progress, results and configuration, which run lists read.

`engine.runs.history` makes it from the journal, which stays the truth, and `engine.runs.recorder` writes it while the
run trains. `engine.runs.run_row` reads it. Importing it imports no events, so a run list appears early.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from engine.foreign.activity import Activity
from engine.runs.folder import RunFolder, RunState
from engine.runs.records import Bottleneck, CodeSummary, GpuSummary, Learning, LearningFault, RankDevice
from engine.utils.codec import (
    ENTRIES,
    Count,
    FileRecord,
    Finite,
    Integer,
    InvalidRecordError,
    Meta,
    Number,
    Seconds,
    UnixTime,
    decode,
    field,
)
from engine.utils.files import read_file
from engine.utils.text import list_names

# The statistics of one GPU take 400 bytes.
MAX_RECORD_BYTES = 1 << 22


# A value of a config is JSON of limited size and depth: the record may come from another user.
_PARTS = Meta(max_length=200)
ConfigText = Annotated[str, Meta(max_length=1000)]
_Scalar = bool | Integer | Finite | ConfigText | None
_Parts = _Scalar | Annotated[list[_Scalar], _PARTS] | Annotated[dict[ConfigText, _Scalar], _PARTS]
_MoreParts = _Scalar | Annotated[list[_Parts], _PARTS] | Annotated[dict[ConfigText, _Parts], _PARTS]
ConfigValue = _Scalar | Annotated[list[_MoreParts], _PARTS] | Annotated[dict[ConfigText, _MoreParts], _PARTS]


class RunRecord(FileRecord, frozen=True, kw_only=True):
    """Content of `summary.json`. A value is null if it is unknown, and a loss, accuracy or metric if it is not finite.

    The owner of the run replaces it at most once a second, and at each change of the state. At the end of a session it
    is a function of the journal and the config.
    """

    state: RunState
    """State of the run as its owner knows it. One that is live while the run has no owner means that the run crashed,
    or that its wait was interrupted."""
    message: str = ""
    """Why the run waits, or why or with which result it ended; "" while it trains."""
    problem: str = ""
    """Why the owner cannot record the run, as a clause; "" if it can."""
    queue_place: Count | None = None
    """Place in the queue, counted from 1, while the run waits for GPUs only."""

    step: Count = 0
    """Number of completed optimizer steps."""
    steps: Count | None = None
    """Number of optimizer steps that the run trains for."""
    epochs: Count = 0
    """Number of completed epochs."""
    total_epochs: Count | None = None
    """Number of epochs that the run trains for (`run.epochs`)."""
    current_epoch: Count = 0
    """Epoch that the ranks are in, counted from 1."""
    phase: str = ""
    """What the ranks do: training, validating, testing or saving; "" if unknown or ended."""

    train_loss: Finite | None = None
    """Training loss of the last epoch."""
    train_accuracy: Finite | None = None
    """Training accuracy of the last epoch, 0 to 1."""
    val_loss: Finite | None = None
    """Validation loss of the last epoch, of the weights that are trained."""
    val_accuracy: Finite | None = None
    """Validation accuracy of the last epoch, 0 to 1, of the weights that are trained."""
    metrics: Annotated[dict[str, Finite | None], ENTRIES] = field(default_factory=dict)
    """The user's own metrics of the last epoch, by name."""
    last_values: Annotated[dict[str, Finite | None], ENTRIES] = field(default_factory=dict)
    """Further metrics of the last epoch by their keys in `engine.runs.metrics`, such as `val_top5`."""
    metric_names: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """What another program calls the metrics that have a key in `engine.runs.metrics`, by that key."""
    best_epoch: Count | None = None
    """Epoch with the highest validation accuracy, of the EMA weights if there are any; of equal epochs that with the
    lowest validation loss, then the latest."""
    best_val_accuracy: Finite | None = None
    """Validation accuracy of the best epoch, 0 to 1, of the EMA weights if there are any."""
    best_epoch_val_loss: Finite | None = None
    """Validation loss of the best epoch, of the EMA weights if there are any."""
    best_val_loss: Finite | None = None
    """Lowest validation loss of all epochs, of the EMA weights if there are any."""
    test_loss: Finite | None = None
    """Loss on the test images, which are evaluated once at the end with the weights of the best epoch."""
    test_accuracy: Finite | None = None
    """Accuracy on the test images, 0 to 1."""
    lowest_metrics: Annotated[dict[str, Finite], ENTRIES] = field(default_factory=dict)
    """The lowest value of each of the user's own metrics over all epochs."""
    highest_metrics: Annotated[dict[str, Finite], ENTRIES] = field(default_factory=dict)
    """The highest value of each of the user's own metrics over all epochs."""

    images_per_second: Number | None = None
    """Median training throughput of the epochs, in images/s over all ranks."""
    rate_now: Number | None = None
    """Latest training throughput, in images/s over all ranks; null unless it trains."""
    data_wait: Number | None = None
    """Share of the training time of the latest epoch that the ranks waited for data, 0 to 1."""
    mfu: Number | None = None
    """Model FLOPs utilization of the latest epoch, 0 to 1."""
    grad_norm: Finite | None = None
    """Latest L2 norm of the gradient, before clipping."""
    bottleneck: Bottleneck | None = None
    """What limits the run, see `engine.runs.bottleneck`."""
    learning: Learning | None = None
    """What keeps the run from learning well, see `engine.runs.learning`."""

    seconds: Seconds = 0.0
    """Duration of all sessions of the run together, in seconds, without pauses."""
    seconds_per_epoch: Seconds | None = None
    """Mean duration of the epochs that the latest session trained from start to end, in seconds."""
    eta_seconds: Seconds | None = None
    """Estimated seconds to the end of the run; null unless it trains."""
    started_at: UnixTime | None = None
    """When the latest session started to train, or the first one to wait, in Unix seconds."""
    updated_at: UnixTime | None = None
    """Time of the latest event, in Unix seconds."""

    config: Annotated[dict[ConfigText, ConfigValue], ENTRIES] | None = None
    """The config values that differ from their defaults, by `section.key`."""
    command: str = ""
    """The command of another program that the run starts, as a line of a shell without secrets; "" for a training."""
    command_parameters: Annotated[dict[ConfigText, _Scalar], ENTRIES] = field(default_factory=dict)
    """The parameters of the command, by the names that its program has for them."""
    code: CodeSummary | None = None
    """The code of the run when it was made, and how it had changed at the latest start; null if it is not recorded."""
    exit_code: Integer | None = None
    """Exit code of the command, negative for the signal that ended it."""
    host: str = ""
    """Host name of rank 0."""
    devices: str = ""
    """Devices of the latest session as text, such as `2 x H200 (GPU 0, 3)` or `the CPU`."""
    gpus: Count | None = None
    """Number of GPUs, 0 on the CPU."""
    ranks: Count | None = None
    """Number of ranks on all nodes."""
    rank_devices: Annotated[list[RankDevice], ENTRIES] = field(default_factory=list)
    """Process and device of each rank of the latest session."""
    global_batch: Count | None = None
    """Images per step over all ranks."""
    parameters: Count | None = None
    """Number of model parameters."""
    train_images: Count | None = None
    """Number of training images."""
    val_images: Count | None = None
    """Number of validation images."""
    classes: Count | None = None
    """Number of classes."""
    versions: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """Version of gputrain, torch and python, by name."""
    cpu_fallback: str = ""
    """Why the run trained on the CPU although the host has GPUs; "" if it did not."""
    gpu_stats: Annotated[list[GpuSummary], ENTRIES] = field(default_factory=list)
    """Statistics of each GPU over the run."""

    @property
    def divergence(self) -> str:
        """Why the run learned nothing that lasts: it diverged, or its last loss is not finite; "" if neither."""
        if self.learning is not None and self.learning.fault is LearningFault.DIVERGED:
            return self.learning.message
        # A training ends at a loss that is not finite, a command need not.
        losses = {"train_loss": self.train_loss, "val_loss": self.val_loss}
        known = {name: losses[key] for key, name in self.metric_names.items() if key in losses}
        known |= {name: value for name, value in self.metrics.items() if "loss" in name.casefold()}
        lost = [name for name, value in known.items() if value is None]
        return f"the last {list_names(lost)} is not finite" if lost else ""


METRIC_FIELDS = (
    "step", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "best_val_loss", "best_val_accuracy",
    "last_values", "metrics", "metric_names", "lowest_metrics", "highest_metrics",
)  # fmt: skip
"""What a run of another program has of metrics. They are in its own files, and not in the journal."""
NO_RECORD = RunRecord(state=RunState.STARTING)
"""Stands for the record of a run without a readable record or journal."""


DIVERGED = "diverged"
"""What lists show in place of the state of a run with a `RunRecord.divergence`."""
# Those of a run that ended by itself, also of one of another program.
_STATES_OF_RESULTS = (RunState.FINISHED, Activity.ENDED, Activity.QUIET)


def shown_state(state: str, record: RunRecord) -> str:
    """Return the state of a run as lists show it."""
    return DIVERGED if state in _STATES_OF_RESULTS and record.divergence else state


def read_run_record(folder: RunFolder) -> RunRecord | None:
    """Return the stored record of a run as `find_stored_record` does."""
    stored = find_stored_record(folder)
    return None if stored is None else stored.record


class StoredRecord(NamedTuple):
    """A record, and when it was written, in ns."""

    record: RunRecord
    written_ns: int


def find_stored_record(folder: RunFolder) -> StoredRecord | None:
    """Return the stored record of a run; None if there is none."""
    try:
        data, status = read_file(f"{folder.path}/summary.json", MAX_RECORD_BYTES)
        return StoredRecord(decode(data, RunRecord), status.st_mtime_ns)
    except (OSError, InvalidRecordError):
        return None
