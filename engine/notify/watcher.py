"""The process that watches one session of a run and sends its messages: `python -m engine.notify.watcher NAME`.

`start_watcher` starts it. It has a session of its own, no terminal, pipe or lock of the run, and outlives the process
that owns the run, so it also reports a `kill -9` of that process. It ends after the session, when its messages are
sent or given up.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine.notify.observer import SessionObserver, WatchOptions
from engine.notify.outbox import RETRY_DELAYS_SECONDS, NotifyLog, Outbox
from engine.runs.folder import RunFolder
from engine.utils.process import lower_priority

POLL_SECONDS = 1.0


def watch(options: WatchOptions, poll_s: float = POLL_SECONDS) -> None:
    """Watch a session to its end, and send its messages. Raises OSError if the run folder cannot be opened."""
    folder = RunFolder(Path(options.folder)).hold()
    if os.fstat(folder.held_fd).st_ino != options.inode:
        # Another folder took its place.
        return
    log = NotifyLog(folder)
    outbox = Outbox(options.urls, log, options.retry_delays_s or RETRY_DELAYS_SECONDS)
    observer = SessionObserver(folder, options)
    try:
        while not (observer.ended and outbox.is_empty):
            if not observer.ended:
                for message in observer.poll():
                    outbox.add(message)
            outbox.tick()
            if not (observer.ended and outbox.is_empty):
                time.sleep(poll_s)
    except Exception as error:
        log.write(f"the watcher failed: {type(error).__name__}: {error}")
        raise


def read_options(text: str) -> WatchOptions:
    """Parse what `start_watcher` sends."""
    # JSON has no tuples.
    values: dict[str, Any] = json.loads(text, object_hook=_lists_to_tuples)
    return WatchOptions(**values)


def _lists_to_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def main() -> None:
    """Read the options from stdin and watch."""
    options = read_options(sys.stdin.read())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    watch(options)


if __name__ == "__main__":
    main()
