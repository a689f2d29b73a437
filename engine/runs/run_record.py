"""The record of a run, `summary.json`: its state, progress, results and configuration, which run lists read.

`engine.runs.history` makes it from the journal, which stays the truth, and `engine.runs.recorder` writes it while the
run trains. `engine.runs.run_row` reads it. Importing it imports no events, so a run list appears early.

Its numbers are `RunRecord.values`, by the keys of `engine.runs.metrics`. In the file, they are beside the other fields:
`stored_form` and `read_back` are the only functions that know how.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from engine.base.codec import (
    ENTRIES,
    Count,
    FileRecord,
    Finite,
    Integer,
    InvalidRecordError,
    Meta,
    Number,
    Record,
    Seconds,
    UnixTime,
    decode,
    define_record,
    field,
    replace,
    write_record,
)
from engine.base.files import read_file
from engine.base.text import list_names
from engine.runs.folder import RunFolder, RunState
from engine.runs.metrics import METRIC_PREFIX, METRICS, ODD_PREFIX, OWN_GROUPS, Unit
from engine.runs.records import Bottleneck, CodeSummary, RankDevice
from engine.watch.activity import Activity

MAX_RECORD_BYTES = 1 << 22


# A value of a config is JSON of limited size and depth: the record may come from another user.
_PARTS = Meta(max_length=200)
ConfigText = Annotated[str, Meta(max_length=1000)]
_Scalar = bool | Integer | Finite | ConfigText | None
_Parts = _Scalar | Annotated[list[_Scalar], _PARTS] | Annotated[dict[ConfigText, _Scalar], _PARTS]
_MoreParts = _Scalar | Annotated[list[_Parts], _PARTS] | Annotated[dict[ConfigText, _Parts], _PARTS]
ConfigValue = _Scalar | Annotated[list[_MoreParts], _PARTS] | Annotated[dict[ConfigText, _MoreParts], _PARTS]


class RunFields(Record, frozen=True):
    """What a record has beside numbers of the registry. A value is None if it is unknown."""

    state: RunState
    """State of the run as its owner knows it. One that is live while the run has no owner means that the run crashed,
    or that its wait was interrupted."""
    message: str = ""
    """Why the run waits, or why or with which result it ended; "" while it trains."""
    problem: str = ""
    """Why the owner cannot record the run, as a clause; "" if it can."""

    current_epoch: Count = 0
    """Epoch that the ranks are in, counted from 1."""
    phase: str = ""
    """What the ranks do: training, validating, testing or saving; "" if unknown or ended."""

    metric_names: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """What another program calls the metrics that have a key in `engine.runs.metrics`, by that key."""

    bottleneck: Bottleneck | None = None
    """What limits the run, see `engine.runs.bottleneck`."""

    seconds_per_epoch: Seconds | None = None
    """Mean duration of the epochs that the latest session trained from start to end, in seconds."""
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
    rank_devices: Annotated[list[RankDevice], ENTRIES] = field(default_factory=list)
    """Process and device of each rank of the latest session."""
    train_images: Count | None = None
    """Number of training images."""
    val_images: Count | None = None
    """Number of validation images."""
    classes: Count | None = None
    """Number of classes."""
    monitor: str = ""
    """Metric of the validation that selects the best epoch (`run.monitor`); "" for a command."""
    monitor_mode: str = "max"
    """Whether its maximum (max) or its minimum (min) is best."""
    versions: Annotated[dict[str, str], ENTRIES] = field(default_factory=dict)
    """Version of gputrain, torch and python, by name."""
    cpu_fallback: str = ""
    """Why the run trained on the CPU although the host has GPUs; "" if it did not."""


LOSSES = ("train_loss", "val_loss")


class RunRecord(RunFields, frozen=True):
    """What is known of a run.

    The owner of the run replaces it at most once a second, and at each change of the state. At the end of a session it
    is a function of the journal and the config.
    """

    values: Annotated[dict[str, Finite | None], ENTRIES] = field(default_factory=dict)
    """Its numbers: those of the registry by their keys, `best` the value of `monitor` of the best epoch, and by
    `metrics.NAME`, `lowest_metrics.NAME` and `highest_metrics.NAME` the user's own ones of the last epoch and the least
    and greatest of all epochs. An unknown number is missing; one of the user that is not finite is None."""

    def count(self, key: str) -> int:
        """Return a number of things; 0 if it is unknown."""
        return int(self.values.get(key) or 0)

    @property
    def seconds(self) -> float:
        """Duration of all sessions together, without pauses; 0 if it is unknown."""
        return self.values.get("seconds") or 0.0

    @property
    def metric_keys(self) -> dict[str, str]:
        """The keys of the metrics that another program logs, by its names for them."""
        own = {key.removeprefix(METRIC_PREFIX): key for key in self.values if key.startswith(METRIC_PREFIX)}
        return {name: key for key, name in self.metric_names.items() if key in METRICS} | own

    def key_of(self, name: str) -> str | None:
        """Return the key of the metric that another program calls so; None if it logs none."""
        if (own := METRIC_PREFIX + name) in self.values:
            return own
        return next((key for key, known in self.metric_names.items() if known == name and key in METRICS), None)

    @property
    def divergence(self) -> str:
        """Which last loss of a command is not finite, as a sentence; "" if none. A training ends at such a loss."""
        lost = {key: name for key, name in self.metric_names.items() if key in LOSSES and self.values.get(key) is None}
        lost |= {
            key: key.removeprefix(METRIC_PREFIX)
            for key, value in self.values.items()
            if value is None and key.startswith(METRIC_PREFIX) and "loss" in key.casefold()
        }
        steps = [step for key in lost if (step := self.values.get(ODD_PREFIX + key)) is not None]
        since = f" since step {int(min(steps)):,}" if steps else ""
        return f"the last {list_names(list(lost.values()))} is not finite{since}" if lost else ""


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


_LOGGED_KEYS = {
    *("step", "train_loss", "train_accuracy", "val_loss", "val_accuracy", "best_val_loss", "best_val_accuracy", "lr"),
}


def with_logged(record: RunRecord, values: Mapping[str, float | None], metric_names: Mapping[str, str]) -> RunRecord:
    """Return the record of a run of another program with these metrics, which are in its own files, and not in the
    journal."""

    def is_logged(key: str) -> bool:
        return key in _LOGGED_KEYS or key.startswith(ODD_PREFIX) or key.partition(".")[0] in OWN_GROUPS

    kept = {key: value for key, value in record.values.items() if not is_logged(key)}
    logged = {key: value for key, value in values.items() if is_logged(key)}
    return replace(record, values=kept | logged, metric_names=dict(metric_names))


TOP_KEYS = (
    "queue_place", "step", "steps", "epochs", "total_epochs", "train_loss", "train_accuracy", "val_loss",
    "val_accuracy", "best", "best_epoch", "best_val_accuracy", "best_epoch_val_loss", "best_val_loss", "test_loss",
    "test_accuracy", "images_per_second", "rate_now", "data_wait", "mfu", "grad_norm", "seconds", "eta_seconds", "gpus",
    "ranks", "global_batch", "parameters",
)  # fmt: skip
"""The numbers at the top level of `summary.json`. Others of the registry are in its `last_values`."""
_ZEROS = {"step": 0, "epochs": 0, "seconds": 0.0}
"""Numbers that are 0 in the file where they are unknown."""
_TYPES: dict[Unit, Any] = {Unit.COUNT: Count, Unit.SECONDS: Seconds, Unit.RATE: Number, Unit.SHARE: Number}


def _type_of(key: str) -> Any:
    return _TYPES.get(METRICS[key].unit, Finite) if key in METRICS else Finite


_VALUES: Any = Annotated[dict[str, Finite | None], ENTRIES]
_FIELDS = attrgetter(*RunFields.__struct_fields__)
_TOP_VALUES = attrgetter(*TOP_KEYS)
StoredForm: Any = define_record(
    "StoredForm",
    {key: (_type_of(key) if key in _ZEROS else _type_of(key) | None, _ZEROS.get(key)) for key in TOP_KEYS}
    | dict.fromkeys(("last_values", *OWN_GROUPS), (_VALUES, field(default_factory=dict))),
    (RunFields, FileRecord),
)
"""The content of `summary.json`."""


def stored_form(record: RunRecord) -> FileRecord:
    """Return a record as `summary.json` and `--json` have it, with the numbers beside the other fields."""
    groups: dict[str, dict[str, float | None]] = {name: {} for name in ("last_values", *OWN_GROUPS)}
    top: dict[str, float | None] = {}
    for key, value in record.values.items():
        group, _, name = key.partition(".")
        if key in TOP_KEYS:
            top[key] = value
        elif name and group in OWN_GROUPS:
            groups[group][name] = value
        else:
            groups["last_values"][key] = value
    form: FileRecord = StoredForm(*_FIELDS(record), **top, **groups)
    return form


def read_back(stored: Any) -> RunRecord:
    """Return the record of the content of `summary.json`."""
    values = {key: value for key, value in zip(TOP_KEYS, _TOP_VALUES(stored), strict=True) if value is not None}
    values |= stored.last_values
    for group in OWN_GROUPS:
        if found := getattr(stored, group):
            values |= {f"{group}.{name}": value for name, value in found.items()}
    if not stored.seconds:
        del values["seconds"]
    if stored.command:
        # It has no epochs, and no steps without metrics.
        del values["epochs"]
        if not (stored.step or stored.metrics):
            del values["step"]
    return RunRecord(*_FIELDS(stored), values)  # type: ignore[call-arg]  # mypy knows no positional fields of it


def write_summary(path: Path, record: RunRecord, *, durable: bool = False) -> None:
    """Replace `summary.json` by a record. Raises OSError."""
    write_record(path, stored_form(record), durable=durable)


class StoredRecord(NamedTuple):
    """A record, and when it was written, in ns."""

    record: RunRecord
    written_ns: int


def find_stored_record(folder: RunFolder) -> StoredRecord | None:
    """Return the stored record of a run; None if there is none."""
    try:
        data, status = read_file(f"{folder.path}/summary.json", MAX_RECORD_BYTES)
        return StoredRecord(read_back(decode(data, StoredForm)), status.st_mtime_ns)
    except (OSError, InvalidRecordError):
        return None
