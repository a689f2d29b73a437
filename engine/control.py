"""Requests to the owner of a run: one JSON file each in its `control/`, put there by rename, removed when taken."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.files import read_json, write_json
from engine.problems import UsageError
from engine.process import user_name

REQUEST_FORMAT = 1


@dataclass(frozen=True)
class Request:
    """Something asked of a run's owner: `stop`."""

    request: str
    by: str


def send_request(control: Path, request: str) -> None:
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
