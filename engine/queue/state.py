"""The place of a run in the queue, which `RUN/queue.json` keeps over a reboot; its reservation in /tmp is lost then.

Only the owner of the run writes the file. `place` and `engine.launch.lifecycle` update it; `listing` reads it to find
runs whose wait was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.gpus.queue_terms import MAX_PRIORITY, MAX_TIME
from engine.runs.folder import RunFolder
from engine.utils.files import read_json, write_json

QUEUE_FORMAT = 1
MAX_QUEUE_BYTES = 1 << 16
MAX_DEPENDENCIES = 100


class QueueStage(StrEnum):
    """How far a run has come. WAITING and GRANTED without an owner: the wait was interrupted."""

    WAITING = "waiting"
    GRANTED = "granted"
    STARTED = "started"
    ENDED = "ended"


PENDING_STAGES = (QueueStage.WAITING, QueueStage.GRANTED)


@dataclass(frozen=True)
class Dependency:
    """A run to wait for. `any_end`: however it ends. `device` and `inode` identify its folder after it was renamed."""

    name: str
    any_end: bool = False
    device: int = 0
    inode: int = 0


@dataclass(frozen=True)
class QueueState:
    """Content of `queue.json`. `submitted_at` is in Unix seconds, `pid` that of the latest supervisor.

    `priority` and `position` order the waiting runs of one user, see `engine.gpus.queue_terms`.
    """

    submitted_at: float
    position: float
    priority: int = 0
    held: bool = False
    after: tuple[Dependency, ...] = ()
    stage: QueueStage = QueueStage.WAITING
    pid: int = 0
    format: int = field(default=QUEUE_FORMAT)


def read_queue_state(folder: RunFolder) -> QueueState | None:
    """Return the place of a run in the queue; None if it never had one or the file is not valid."""
    values = read_json(folder.queue, MAX_QUEUE_BYTES)
    if values is None:
        return None
    try:
        return _parse(values)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _parse(values: Mapping[str, Any]) -> QueueState:
    """Raises KeyError, TypeError, ValueError or OverflowError."""
    after = [
        Dependency(_name(entry["name"]), entry["any_end"] is True, int(entry["device"]), int(entry["inode"]))
        for entry in list(values["after"])[:MAX_DEPENDENCIES]
    ]
    return QueueState(
        submitted_at=valid_position(values["submitted_at"]),
        position=valid_position(values["position"]),
        priority=valid_priority(values["priority"]),
        held=values["held"] is True,
        after=tuple(after),
        stage=QueueStage(values["stage"]),
        pid=int(values["pid"]),
    )


def _name(value: object) -> str:
    """Return the name of a run folder. Raises ValueError: another user may have written a path that leads elsewhere."""
    if not isinstance(value, str) or Path(value).name != value or value in ("", ".."):
        raise ValueError(f"{value!r} is no name of a run")
    return value


def valid_priority(value: object) -> int:
    """Return a priority from a file. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
        raise ValueError(f"{value!r} is no priority")
    return value


def valid_position(value: object) -> float:
    """Return a position or a Unix time from a file. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise ValueError(f"{value!r} is no position")
    return max(-MAX_TIME, min(value, MAX_TIME))


def write_queue_state(folder: RunFolder, state: QueueState) -> None:
    """Replace `queue.json`. Errors are ignored: a full disk must not end a run that waits."""
    with suppress(OSError):
        write_json(folder.queue, asdict(state))


def is_interrupted(folder: RunFolder) -> bool:
    """Whether a run was waiting, or had not begun to train, when its supervisor was killed."""
    state = read_queue_state(folder)
    return state is not None and state.stage in PENDING_STAGES and not folder.is_owned()
