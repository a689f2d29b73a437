"""Requests to the owner of a run: one JSON file each in its `control/`, put there by rename, removed when taken."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.files import read_json, write_json
from engine.problems import UsageError
from engine.process import user_name

REQUEST_FORMAT = 1
RequestName = Literal["stop", "checkpoint", "pause", "continue"]
REQUESTS: tuple[str, ...] = get_args(RequestName)


@dataclass(frozen=True)
class Request:
    """Something asked of a run's owner; known are those of `REQUESTS`."""

    request: str
    by: str


@dataclass
class Asked:
    """What a run has been asked for so far: to stop; how many checkpoints; `holds`, how often to pause or to go on
    again, which is odd while it is to pause; and how many checkpoints the clock asked for. Each only grows, so the most
    that any rank knows of is the latest."""

    stop: bool = False
    checkpoints: int = 0
    holds: int = 0
    due: int = 0

    @property
    def paused(self) -> bool:
        return self.holds % 2 == 1

    def take(self, request: str) -> str:
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
            self.holds += 1
            return "at the next step" if self.paused else "at once"
        return "not known here, left undone"

    def numbers(self) -> list[int]:
        return [int(self.stop), self.checkpoints, self.holds, self.due]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Asked:
        return cls(bool(numbers[0]), *numbers[1:])


def send_request(control: Path, request: RequestName) -> None:
    """Raises UsageError where this user may not."""
    by = f"{user_name()}@{socket.gethostname()} (process {os.getpid()})"
    path = control / f"{time.time_ns()}-{os.getpid()}.json"
    values = {"format": REQUEST_FORMAT, "request": request, "by": by, "time": round(time.time(), 3)}
    try:
        control.mkdir(exist_ok=True)
        write_json(path, values)
    except OSError as error:
        raise UsageError.one(str(control), f"you may not ask this run to {request}: {error.strerror}") from error


def take_requests(control: Path) -> Iterator[Request]:
    """The requests that came in since the last call, oldest first; each is removed as it is taken."""
    try:
        paths = sorted(path for path in control.iterdir() if path.suffix == ".json")
    except OSError:
        return
    for path in paths:
        values = read_json(path)
        try:
            path.unlink()
        except OSError:
            continue
        if values is not None:
            yield Request(str(values.get("request", "")), str(values.get("by", "someone")))
