"""Send the messages of a run from a thread of the process that owns it: `engine.launch` calls it."""

from __future__ import annotations

import os
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from engine.config.notify_section import URLS_KEY
from engine.config.schema import Config
from engine.notify.destinations import has_destinations, read_destinations
from engine.notify.message import Message, make_end_message
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem, not_installed
from engine.utils.files import append_to_file
from engine.utils.text import printable

if TYPE_CHECKING:
    from engine.notify.observer import SessionObserver

POLL_SECONDS = 1.0
# The end of a run waits this long for its last message.
LAST_MESSAGE_SECONDS = 15.0
MAX_LOG_BYTES = 1 << 18


def is_notified(config: Config) -> bool:
    """Whether a run sends messages."""
    return bool(config.notify.when) and has_destinations(config.notify.urls)


def notify_problems(config: Config) -> list[Problem]:
    """Return why messages of a new run could not be sent. A resumed run warns instead: it must not fail over this."""
    return [replace(problem, location=URLS_KEY) for problem in _problems(config)] if config.notify.urls else []


def _problems(config: Config) -> list[Problem]:
    if not is_notified(config):
        return []
    problems = read_destinations(config.notify.urls)[1]
    missing = [] if find_spec("apprise") else [Problem("", not_installed("apprise"), code="not-installed")]
    return missing + problems


class RunNotifier:
    """Sends the messages of one session of a run in a thread. Training never waits for it."""

    def __init__(self, folder: RunFolder, config: Config, *, waited_s: float = 0.0, gpus: Sequence[str] = ()) -> None:
        """Start the thread if the user wants messages. `waited_s` is how long the run waited for its GPUs."""
        self.warnings = [
            replace(problem, reason=f"{problem.reason}; the run goes on without") for problem in _problems(config)
        ]
        """Why messages cannot be sent."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        if is_notified(config):
            # Most runs send no messages, and do not need it.
            from engine.notify.observer import SessionObserver

            observer = SessionObserver(folder, config, gpus, waited_s)
            self._thread = threading.Thread(target=self._watch, args=(observer,), name="messages", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait for the message about the end of the run, at most `LAST_MESSAGE_SECONDS`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(LAST_MESSAGE_SECONDS)

    def _watch(self, observer: SessionObserver) -> None:
        while not observer.ended:
            is_last = self._closing.wait(POLL_SECONDS)
            for message in observer.poll():
                send_logged(observer.folder, message, observer.config.notify.urls)
            if is_last:
                return


def send_held(folder: RunFolder, config: Config, reason: str) -> None:
    """Send why a run and the rest of its batch are held, unless the user wants no such message. Does not block."""
    if "held" not in config.notify.when or not is_notified(config):
        return
    path = folder.path
    command = f"gputrain queue release {shlex.quote(path.name)} --runs-dir {shlex.quote(str(path.parent))}"
    lines = [reason, f"start the rest with: {command}"]
    message = make_end_message("held", f"the batch of {path.name}", socket.gethostname(), lines)
    # It waits for the network, and the place in the queue must be kept alive meanwhile.
    arguments = (folder, message, config.notify.urls)
    threading.Thread(target=send_logged, args=arguments, name="held-message", daemon=True).start()


def send_logged(folder: RunFolder, message: Message, references: Sequence[str]) -> None:
    """Send a message, and append what became of it to `notify.log` of the run, which only this user can read."""
    from engine.notify.sender import send_message

    for delivery in send_message(message, references):
        line = printable(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message.occasion}: {delivery.line}")
        with suppress(OSError):
            handle = append_to_file(folder.notify_log)
            try:
                os.fchmod(handle, 0o600)
                if os.fstat(handle).st_size < MAX_LOG_BYTES:
                    os.write(handle, f"{line}\n".encode())
            finally:
                os.close(handle)
