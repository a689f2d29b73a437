"""Requests to the owner of a run: one JSON file each in its `control/`, put there by rename, removed when taken.

Who may write there is not always who may ask: a shared runs folder can be open to a group. A request is taken from a
file of the user that the run belongs to, and from one of root's, who could end the run in other ways.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.utils.errors import UsageError
from engine.utils.files import write_json
from engine.utils.process import user_name

REQUEST_FORMAT = 1
RequestName = Literal["stop", "checkpoint", "pause", "continue"]
REQUEST_NAMES: tuple[str, ...] = get_args(RequestName)
# A request takes some 200 bytes.
MAX_REQUEST_BYTES = 1 << 16
# What stands for a request that was not so much as read, and what comes of it.
REFUSAL_OUTCOMES = {
    "foreign file": "refused: the file belongs to another user than the run",
    "strange file": "refused: it is not a regular file",
    "large file": f"refused: it has more than {MAX_REQUEST_BYTES} bytes",
    "unreadable file": "refused: it holds no request",
}


@dataclass(frozen=True)
class ControlRequest:
    """Something asked of a run's owner; known are those of `REQUEST_NAMES`. One of `REFUSAL_OUTCOMES` is not to be
    done."""

    request: str
    by: str


@dataclass
class RequestCounters:
    """What a run has been asked for so far: to stop; how many checkpoints; `pause_toggles`, how often to pause or to go
    on again, which is odd while it is to pause; and how many checkpoints the clock asked for. Each only grows, so the
    most that any rank knows of is the latest."""

    stop: bool = False
    checkpoints: int = 0
    pause_toggles: int = 0
    timed_checkpoints: int = 0

    @property
    def paused(self) -> bool:
        return self.pause_toggles % 2 == 1

    def apply(self, request: str) -> str:
        """Note a request; what comes of it, in words."""
        if request == "stop":
            already, self.stop = self.stop, True
            return "was asked for already" if already else "at the next step, with a checkpoint"
        if request == "checkpoint":
            self.checkpoints += 1
            return "at the next step"
        if request in ("pause", "continue"):
            if self.paused == (request == "pause"):
                return "is paused already" if self.paused else "is not paused"
            self.pause_toggles += 1
            return "at the next step" if self.paused else "at once"
        return REFUSAL_OUTCOMES.get(request, "not known here, left undone")

    def to_list(self) -> list[int]:
        return [int(self.stop), self.checkpoints, self.pause_toggles, self.timed_checkpoints]

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> RequestCounters:
        return cls(bool(numbers[0]), *numbers[1:])


def send_request(control_folder: Path, request: RequestName) -> None:
    """Raises UsageError where this user may not."""
    by = f"{user_name()}@{socket.gethostname()} (process {os.getpid()})"
    path = control_folder / f"{time.time_ns()}-{os.getpid()}.json"
    values = {"format": REQUEST_FORMAT, "request": request, "by": by, "time": round(time.time(), 3)}
    try:
        owner = _owner_uid(control_folder)
        if owner is not None and os.geteuid() not in (owner, 0):
            # It would be refused there, and who waits for it would wait for ever.
            raise UsageError.one(
                str(control_folder), f"you may not ask this run to {request}: it belongs to uid {owner}"
            )
        control_folder.mkdir(exist_ok=True)
        write_json(path, values)
    except OSError as error:
        raise UsageError.one(str(control_folder), f"you may not ask this run to {request}: {error.strerror}") from error


def _owner_uid(control_folder: Path) -> int | None:
    """The user whose process has the run in its hands, or had it last; None where none had. Raises OSError."""
    try:
        return control_folder.with_name("owner.json").stat().st_uid
    except FileNotFoundError:
        return None


def consume_requests(control_folder: Path) -> Iterator[ControlRequest]:
    """The requests that came in since the last call, oldest first; each is removed as it is taken. What cannot be
    removed is passed over, or it would be done again at every call."""
    try:
        # By its handle: a link in its place could lead to a folder whose files are no requests.
        folder = os.open(control_folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for name in sorted(name for name in os.listdir(folder) if name.endswith(".json")):  # noqa: PTH208 (a handle)
            try:
                request = _read_request(folder, name)
                _remove_request(folder, name)
            except OSError:
                continue
            yield request
    except OSError:
        return
    finally:
        os.close(folder)


def _read_request(folder: int, name: str) -> ControlRequest:
    """Neither follows a link nor waits for a writer. Raises OSError where there is no such file."""
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    by = f"uid {status.st_uid}"
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        regular = stat.S_ISREG(status.st_mode)
        return ControlRequest(
            "strange file" if not regular else "foreign file" if _is_foreign(status) else "unreadable file", by
        )
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return ControlRequest("strange file", by)
        if _is_foreign(status):
            return ControlRequest("foreign file", by)
        if status.st_size > MAX_REQUEST_BYTES:
            return ControlRequest("large file", by)
        values = json.loads(os.read(handle, MAX_REQUEST_BYTES))
        return ControlRequest(str(values["request"]), str(values.get("by", "someone")))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return ControlRequest("unreadable file", by)
    finally:
        os.close(handle)


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (os.geteuid(), 0)


def _remove_request(folder: int, name: str) -> None:
    """Raises OSError where it cannot be. A folder only gets another name: what lies in it is not ours to delete."""
    try:
        os.unlink(name, dir_fd=folder)
    except (IsADirectoryError, PermissionError):
        os.rename(name, f"{name}.{time.time_ns()}.refused", src_dir_fd=folder, dst_dir_fd=folder)
