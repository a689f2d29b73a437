"""Copy several runs to one service, once or until they have ended. `gputrain sync` calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from engine.sync.remote import SyncError
from engine.sync.run_sync import RunSync

POLL_SECONDS = 1.0
# Between attempts to reach a service that was there when the command started.
RETRY_SECONDS = 15.0


def sync_runs(
    syncs: Sequence[RunSync],
    *,
    follow: bool,
    stop: Callable[[], bool],
    on_progress: Callable[[RunSync, bool], None],
    on_interruption: Callable[[SyncError], None],
) -> None:
    """Poll each run once, or with `follow` until all have ended or `stop` returns True.

    `on_progress` gets each run after each poll, and whether it is complete. Once every run was sent once, a service
    that cannot be reached is tried again, and `on_interruption` gets the error. Raises SyncError.
    """
    pending, is_first_round = list(syncs), True
    with ExitStack() as stack:
        # Each is closed, even where another cannot be.
        for sync in reversed(syncs):
            stack.callback(sync.close)
        while pending:
            pause = POLL_SECONDS
            try:
                for sync in list(pending):
                    complete = sync.poll()
                    on_progress(sync, complete)
                    if complete:
                        pending.remove(sync)
                    if stop():
                        return
            except SyncError as error:
                if is_first_round or not error.temporary:
                    raise
                on_interruption(error)
                pause = RETRY_SECONDS
            if not follow:
                return
            is_first_round = False
            _wait(pause, stop)


def _wait(seconds: float, stop: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stop() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
