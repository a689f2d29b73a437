"""The messages of one run that are still to be sent, with their retries, and the log of what became of them.

`watcher` fills it. A try takes at most `TRY_TIMEOUT_SECONDS`, so the outbox is empty after a bounded time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from engine.notify.message import Message
from engine.notify.sender import Delivery, send_message
from engine.runs.folder import RunFolder
from engine.utils.files import append_to_file
from engine.utils.text import printable

# Waits before the second and the later tries, for destinations that did not take the message.
RETRY_DELAYS_SECONDS = (5.0, 30.0, 180.0)
# On a host whose cores are busy, a sender of low priority needs ten seconds to start.
TRY_TIMEOUT_SECONDS = 60.0
MAX_LOG_BYTES = 1 << 18


@dataclass(frozen=True)
class _Pending:
    """A message to send at `due` on the monotonic clock; `labels` are the destinations of a retry."""

    message: Message
    due: float
    tries: int = 0
    labels: tuple[str, ...] | None = None


class Outbox:
    """Sends messages in their order, and again to the destinations that failed."""

    def __init__(
        self,
        urls: Sequence[str],
        log: NotifyLog,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_SECONDS,
        send: Callable[[Message, Sequence[str], Sequence[str] | None], list[Delivery]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._urls, self._log, self._retry_delays_s = urls, log, retry_delays_s
        self._send = send or partial(send_message, timeout_s=TRY_TIMEOUT_SECONDS, in_background=True)
        self._clock = clock
        self._pending: list[_Pending] = []

    def add(self, message: Message) -> None:
        """Add a message, which the next `tick` sends."""
        self._pending.append(_Pending(message, self._clock()))

    @property
    def is_empty(self) -> bool:
        """Whether each message was sent or given up."""
        return not self._pending

    def tick(self) -> None:
        """Try to send the first message that is due."""
        due = next((item for item in self._pending if item.due <= self._clock()), None)
        if due is None:
            return
        self._pending.remove(due)
        deliveries = self._send(due.message, self._urls, due.labels)
        tries = due.tries + 1
        failed = tuple(item.label for item in deliveries if not item.sent and item.can_retry)
        retries = failed and tries <= len(self._retry_delays_s)
        for delivery in deliveries:
            again = f" (try {tries} of {len(self._retry_delays_s) + 1})" if delivery.label in failed else ""
            self._log.write(f"{due.message.occasion}: {delivery.line}{again}")
        if retries:
            self._pending.append(_Pending(due.message, self._clock() + self._retry_delays_s[tries - 1], tries, failed))


class NotifyLog:
    """Appends lines to `notify.log` of a run, which only this user can read. Errors are ignored."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.notify_log

    def write(self, line: str) -> None:
        """Append one line with the time, unless the file has reached `MAX_LOG_BYTES`."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):
            handle = append_to_file(self._path)
            try:
                os.fchmod(handle, 0o600)
                if os.fstat(handle).st_size < MAX_LOG_BYTES:
                    os.write(handle, f"{stamp}  {printable(line)}\n".encode())
            finally:
                os.close(handle)
