"""Control requests to a running run (stop, checkpoint, pause, continue) or a waiting one (hold, release, order, begin,
stop).

A request is one JSON file in `RUN/control/`, created by rename and removed when the supervisor (or rank 0 under
torchrun and srun) receives it. A shared runs folder can be writable for a group, so write permission is not enough: a
request must come from a file that belongs to the run's user or to root.

A full disk still takes an empty file, whose name holds the request: `TIME-PID-stop.json`.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from engine.base.codec import (
    UNSET,
    FileRecord,
    Integer,
    InvalidRecordError,
    Meta,
    Number,
    UnixTime,
    UnsetType,
    decode,
    write_record,
)
from engine.base.errors import UsageError
from engine.base.files import open_regular_file, opened_folder
from engine.base.process import user_name
from engine.runs.sinks import disk_problem

RequestName = Literal["stop", "checkpoint", "pause", "continue", "profile"]
REQUEST_NAMES: tuple[str, ...] = get_args(RequestName)
# Requests to a run that waits for GPUs, see `engine.jobs.queue.place`.
QueueRequestName = Literal["hold", "release", "order", "begin"]
QUEUE_REQUEST_NAMES: tuple[str, ...] = get_args(QueueRequestName)
# Optimizer steps of a profile.
DEFAULT_PROFILE_STEPS, MAX_PROFILE_STEPS = 10, 100
# A valid request has about 200 bytes.
MAX_REQUEST_BYTES = 1 << 16
# Name of an empty request file: time, process and request. A file with content appears by rename, so it is never empty.
_EMPTY_REQUEST = re.compile(r"\d+-\d+-([a-z]+)\.json")
# Outcome of each kind of file that is not read as a request. The keys stand for the request in `ControlEvent`.
REFUSAL_OUTCOMES = {
    "foreign file": "refused: the file must belong to the user of the run, or to root",
    "unreadable file": "refused: the file contains no valid request",
}


class ControlRequest(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A request: `request` is one of `REQUEST_NAMES` or `QUEUE_REQUEST_NAMES`, a key of `REFUSAL_OUTCOMES` for a
    refused file, or an unknown name; `by` is the sender."""

    request: str
    by: str = "someone"
    time: UnixTime | UnsetType = UNSET
    steps: Annotated[int, Meta(ge=0, le=MAX_PROFILE_STEPS)] = 0
    """Number of steps of a profile; 0, which is refused, if the file has none that is allowed."""
    priority: Integer | UnsetType = UNSET
    position: Number | UnsetType = UNSET
    """With `priority`, the new place in the order of the queue, see `engine.gpus.queue_terms`."""
    begin: Number | UnsetType = UNSET
    """The Unix time before which the run does not start; 0 for none."""


@dataclass
class RequestCounters:
    """Requests that a run has received so far. Counters only grow, so ranks agree on the latest state by a MAX
    all-reduce.

    `checkpoints` counts requested checkpoints, `timed_checkpoints` those of the timer (`checkpoint.every_minutes`), and
    `pause_toggles` pause and continue requests: an odd number means paused. `profile_steps` is the sum of the steps of
    all requested profiles, so that the ranks also agree on the number of steps.
    """

    stop: bool = False
    checkpoints: int = 0
    pause_toggles: int = 0
    timed_checkpoints: int = 0
    profile_steps: int = 0

    @property
    def paused(self) -> bool:
        return self.pause_toggles % 2 == 1

    def apply(self, request: str, steps: int = DEFAULT_PROFILE_STEPS) -> str:
        """Count a request and return its outcome as text; `steps` are those of a profile, 0 if they are invalid."""
        match request:
            case "stop":
                already, self.stop = self.stop, True
                return "already requested" if already else "at the next step, with a checkpoint"
            case "checkpoint":
                self.checkpoints += 1
                return "at the next step"
            case "pause" | "continue":
                if self.paused == (request == "pause"):
                    return "already paused" if self.paused else "not paused"
                self.pause_toggles += 1
                return "at the next step" if self.paused else "immediately"
            case "profile":
                if steps == 0:
                    return f"refused: a profile has 1 to {MAX_PROFILE_STEPS} steps"
                self.profile_steps += steps
                return "when the run continues" if self.paused else "at the next training step"
            case _ if request in QUEUE_REQUEST_NAMES:
                return "ignored: the run does not wait for GPUs"
        return REFUSAL_OUTCOMES.get(request, "unknown request, ignored")

    def to_list(self) -> list[int]:
        """Return the counters as integers for a MAX all-reduce."""
        return [int(self.stop), self.checkpoints, self.pause_toggles, self.timed_checkpoints, self.profile_steps]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> RequestCounters:
        """Return counters from the result of `to_list`."""
        return cls(bool(numbers[0]), *numbers[1:])


def send_request(
    control_folder: Path,
    request: RequestName | QueueRequestName,
    *,
    steps: int = 0,
    priority: int | UnsetType = UNSET,
    position: float | UnsetType = UNSET,
    begin: float | UnsetType = UNSET,
) -> None:
    """Write a control request for the owner of the run. Raises UsageError if this user may not control the run."""
    by = f"{user_name()}@{socket.gethostname()} (process {os.getpid()})"
    name = f"{time.time_ns()}-{os.getpid()}"
    location = str(control_folder)
    now = round(time.time(), 3)
    record = ControlRequest(
        request=request, by=by, time=now, steps=steps, priority=priority, position=position, begin=begin
    )
    try:
        # A run that never had an owner has no such file.
        with suppress(FileNotFoundError):
            owner = control_folder.with_name("owner.json").stat().st_uid
            if os.geteuid() not in (owner, 0):
                # The owner would refuse the request, and `gputrain stop` would wait for it forever.
                reason = f"no permission to {request} this run: it belongs to uid {owner}"
                raise UsageError.one(location, reason, code="foreign-owner")
        control_folder.mkdir(exist_ok=True)
        # A link could lead to a folder in which another program executes files.
        with opened_folder(control_folder) as folder:
            try:
                write_record(folder / f"{name}.json", record)
            except OSError as error:
                if disk_problem(error) is None or request in ("profile", "order", "begin"):
                    raise
                # A full disk still takes a file without content.
                path = folder / f"{name}-{request}.json"
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except OSError as error:
        problem = disk_problem(error)
        reason = f"no permission to {request} this run: {error.strerror}"
        reason = reason if problem is None else f"cannot {request} this run: {problem}; free space there"
        raise UsageError.one(location, reason, code="not-writable") from error


def consume_requests(control_folder: Path) -> Iterator[ControlRequest]:
    """Yield the requests that arrived since the last call, oldest first, and remove each one.

    A file that cannot be removed is skipped, because it would be executed again at every call.
    """
    # Opened without following links: a symlinked control folder could point to files that are not requests.
    with suppress(OSError), opened_folder(control_folder) as folder:
        for path in sorted(path for path in folder.iterdir() if path.name.endswith(".json")):
            with suppress(OSError):
                request = _read_request(path)
                _remove_request(path)
                yield request


def _read_request(path: Path) -> ControlRequest:
    """Read one request, without following a link or blocking on a pipe. Raises OSError if the file is gone."""
    status, data = path.lstat(), None
    if not stat.S_ISREG(status.st_mode):
        return ControlRequest(request="unreadable file", by=f"uid {status.st_uid}")
    with suppress(OSError), open_regular_file(path) as file:
        # Another file may have taken its place.
        status, data = os.fstat(file.fileno()), file.read(MAX_REQUEST_BYTES)
    if status.st_uid not in (os.geteuid(), 0):
        request = "foreign file"
    elif data is None or status.st_size > MAX_REQUEST_BYTES:
        request = "unreadable file"
    elif not data and (match := _EMPTY_REQUEST.fullmatch(path.name)) is not None:
        request = match[1]
    else:
        with suppress(InvalidRecordError):
            return decode(data, ControlRequest)
        request = "unreadable file"
    return ControlRequest(request=request, by=f"uid {status.st_uid}")


def _remove_request(path: Path) -> None:
    """Remove a request. A folder is renamed instead, because its content may belong to a user. Raises OSError."""
    try:
        path.unlink()
    except (IsADirectoryError, PermissionError):
        path.rename(path.with_name(f"{path.name}.{time.time_ns()}.refused"))
