"""A thread that reads something periodically, and publishes the latest result for a screen.

The other modules of this package say what is read. `tui.screens.base` starts the thread and ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.base.codec import InvalidRecordError
from engine.base.errors import Problem, UsageError

POLL_INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 1.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class RefreshIntervals:
    """Seconds between polls, and the minimum number of seconds between chart redraws."""

    poll_s: float = 1.0
    charts_s: float = 3.0


LOW_BANDWIDTH_INTERVALS = RefreshIntervals(5.0, 15.0)
# A screen that gets no key and no mouse event for so long is refreshed as with a low bandwidth, because people leave
# monitors open.
UNATTENDED_SECONDS = 60.0


class Poller:
    """A daemon thread that calls `poll` periodically. `close` requests its end without waiting for it."""

    def __init__(self, name: str, interval_s: float | None) -> None:
        """Without an interval, the thread polls when it starts, and on request."""
        self.name = name
        self._interval_s = interval_s
        self._stop_event = threading.Event()
        self._wake_event = threading.Event()
        self.on_first_result: Callable[[], None] | None = None
        """Called once, in the thread, when the poller has its first result, and before for a part of it."""
        self.on_poll: Callable[[], object] = lambda: None
        """Called in the thread after each poll."""
        self.problem: Problem | None = None
        """Why the latest poll failed; None if it succeeded."""
        self.min_interval_s = 0.0
        """Seconds between polls at least, except for requested ones."""

    def start(self) -> None:
        """Start the thread; at most once."""
        threading.Thread(target=self._poll_loop, name=self.name, daemon=True).start()

    def close(self) -> None:
        """Request the end of the thread."""
        self._stop_event.set()
        self._wake_event.set()

    def request_poll(self) -> None:
        """Poll at once, without waiting for the end of the interval."""
        self._wake_event.set()

    def _poll_loop(self) -> None:
        unexpected: Problem | None = None
        try:
            while not self._stop_event.is_set():
                try:
                    self.poll()
                    if self.problem is unexpected:
                        self.problem = None
                    if self.on_first_result is not None and self.has_result():
                        self.on_first_result()
                        self.on_first_result = None
                    self.on_poll()
                except Exception as error:
                    # An uncaught exception would end the thread and silently freeze the screen.
                    reason = f"unexpected error: {type(error).__name__}: {error}"
                    unexpected = self.problem = Problem("", reason, code="internal-error")
                    self._stop_event.wait(RETRY_SECONDS)
                self._wake_event.wait(self._interval_s and max(self._interval_s, self.min_interval_s))
                self._wake_event.clear()
        finally:
            self.cleanup()

    def poll(self) -> None:
        """Read once and publish the result; called in the thread."""
        raise NotImplementedError

    def has_result(self) -> bool:
        """Whether a poll has published a result."""
        return True

    def cleanup(self) -> None:
        """Release resources; called by the thread before it ends."""


class Watched(Poller, Generic[Value]):
    """Publishes the latest `value` of a file or of another source, and the `problem` of reading it.

    A file that is missing has neither. One that cannot be read has a problem, and the value keeps what was read before.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Value | None],
        stamp: Callable[[], Hashable] = object,
        interval_s: float | None = POLL_INTERVAL_SECONDS,
    ) -> None:
        """`read` returns the value, None if there is none. It is called when `stamp` has changed, which is None for a
        missing file; by default, in each poll. `name` is that of the thread, and begins the sentence of a problem.

        `read` and `stamp` may raise OSError, InvalidRecordError and UsageError."""
        super().__init__(name, interval_s)
        self._read, self._stamp = read, stamp
        self._read_stamp: Hashable = None
        self.value: Value | None = None
        self.has_polled = False
        """Whether `value` and `problem` are known."""

    def poll(self) -> None:
        # Before the file is read: what is written in between changes the stamp of the next poll.
        # After an unexpected error, the file is read again.
        stamp, read_stamp, self._read_stamp = None, self._read_stamp, None
        try:
            stamp = self._stamp()
            if stamp is None:
                self.value = self.problem = None
            elif stamp != read_stamp:
                self.value, self.problem = self._read(), None
        except FileNotFoundError:
            self.value = self.problem = stamp = None
        except UsageError as error:
            self.problem, stamp = error.problems[0], None
        except InvalidRecordError as error:
            self.problem = Problem("", f"{self.name} {error}", code=error.code)
            # A damaged file stays so until it changes. Access to a file may change without a trace in its stamp.
            stamp = None if error.code == "not-readable" else stamp
        except OSError as error:
            reason = f"{self.name} cannot be read: {error.strerror or error}"
            self.problem, stamp = Problem("", reason, code="not-readable"), None
        self._read_stamp, self.has_polled = stamp, True

    def has_result(self) -> bool:
        return self.has_polled
