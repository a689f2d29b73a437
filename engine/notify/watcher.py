"""The process that watches one session of a run and sends its messages: `python -m engine.notify.watcher NAME`.

`start_watcher` starts it. It has a session of its own, no terminal, pipe or lock of the run, and outlives the process
that owns the run, so it also reports a `kill -9` of that process. It ends after the session, when its messages are
sent or given up.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from engine.notify.observer import SessionObserver, WatchOptions
from engine.notify.outbox import RETRY_DELAYS_SECONDS, NotifyLog, Outbox
from engine.runs.folder import RunFolder
from engine.utils.codec import decode
from engine.utils.files import file_number
from engine.utils.process import lower_priority

POLL_SECONDS = 1.0


def watch(options: WatchOptions, poll_s: float = POLL_SECONDS) -> None:
    """Watch a session to its end, and send its messages. Raises OSError if the run folder cannot be opened."""
    folder = RunFolder(Path(options.folder)).hold()
    if file_number(os.fstat(folder.held_fd).st_ino) != options.inode:
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


def main() -> None:
    """Read the options that `start_watcher` sends from stdin, and watch."""
    options = decode(sys.stdin.buffer.read(), WatchOptions)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    watch(options)


if __name__ == "__main__":
    main()
