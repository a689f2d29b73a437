"""Start runs again whose wait in the queue was interrupted, for example by a reboot, in their old order.

`gputrain queue resume` and the screen call it. It starts the command that a person would type, detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.launch.detached import LaunchedRun
from engine.queue.listing import QueueRow, list_queue
from engine.queue.state import QueueStage, read_queue_state
from engine.runs.folder import RunFolder
from engine.utils.wait import wait_until

LISTED_TIMEOUT_SECONDS = 30.0
# Starts `gputrain` with these arguments and this runs folder, detached. Raises UsageError.
StartCommand = Callable[[Sequence[str], Path], LaunchedRun]


@dataclass(frozen=True)
class ResumedWait:
    """What became of a run: `output` is what its command printed if it did not start."""

    row: QueueRow
    output: tuple[str, ...] = ()
    accepted: bool = True


def resume_waits(rows: Sequence[QueueRow], start: StartCommand, flags: Sequence[str] = ()) -> Iterator[ResumedWait]:
    """Start interrupted runs one after the other, each once the one before it is in the queue.

    `flags` are those of `gputrain resume`. Raises UsageError if a command cannot be started."""
    for row in rows:
        folder = Path(row.folder)
        launched = start(["resume", "--headless", "--detached", *flags, row.folder], folder.parent)
        accepted = wait_until_queued(launched)
        yield ResumedWait(row, () if accepted else tuple(launched.output_lines()), accepted is not None)


def wait_until_queued(launched: LaunchedRun) -> RunFolder | None:
    """Wait until a detached run is listed in the queue, or does not wait; None if it was refused."""
    if (folder := launched.wait_until_accepted()) is None:
        return None

    def has_joined() -> bool:
        state = read_queue_state(folder)
        if launched.exit_code is not None or state is None or state.stage is not QueueStage.WAITING:
            return True
        return any(row.folder == str(folder.path) for row in list_queue())

    wait_until(has_joined, LISTED_TIMEOUT_SECONDS)
    return folder
