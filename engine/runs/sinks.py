"""Outputs that a run can do without: log, record, TensorBoard, messages, readings of its GPUs.

A `Sink` calls what writes such an output. If that fails, it warns once, switches the output off and tries again later,
so that no error of an output ends the run. `engine.runs.recorder` and `engine.jobs.launch` use it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from engine.base.errors import Problem

RETRY_SECONDS = 30.0
# An output that fails again and again is reported no more often.
WARNING_INTERVAL_SECONDS = 600.0
# What makes a disk refuse all writes, in the words of the warnings.
DISK_PROBLEMS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EROFS: "the disk is read-only",
}


def disk_problem(error: BaseException) -> str | None:
    """Return what is wrong with the disk, as a clause; None for another error."""
    return DISK_PROBLEMS.get(error.errno or 0) if isinstance(error, OSError) else None


def describe_error(error: BaseException) -> str:
    """Return the reason in an error, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, SinkError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class SinkError(Exception):
    """What a `Sink` calls failed. The message says why in a clause."""


class Sink:
    """One output. `name` is the beginning of its warnings; `warn` receives them, and must not raise.

    `on_error` may report an error instead: it returns True if no warning is needed.
    """

    def __init__(
        self,
        name: str,
        warn: Callable[[Problem], object],
        *,
        on_error: Callable[[Exception], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._warn, self._on_error, self._clock = name, warn, on_error, clock
        self.failed = False
        """Whether the output is switched off."""
        self.handled = False
        """Whether `on_error` reported why it is switched off."""
        self._retry_at = 0.0
        self._warned_at: float | None = None
        self._is_reported = False

    def attempt(self, write: Callable[[], object], *, force: bool = False) -> None:
        """Call `write`, unless the output failed less than `RETRY_SECONDS` ago; `force` calls it anyway.

        Never raises an Exception.
        """
        if self.failed and not force and self._clock() < self._retry_at:
            return
        try:
            write()
        except Exception as error:
            self._fail(error)
            return
        if self.failed:
            self.failed = self.handled = False
            if self._is_reported:
                self._warn(Problem("", f"{self._name} works again", code="recovered"))

    def retry_now(self) -> None:
        """Make the next attempt one that calls `write`."""
        self._retry_at = 0.0

    def _fail(self, error: Exception) -> None:
        was_failed, self.failed = self.failed, True
        now = self._clock()
        self._retry_at = now + RETRY_SECONDS
        if was_failed:
            return
        self._is_reported, self.handled = False, self._on_error(error)
        if self.handled or (self._warned_at is not None and now - self._warned_at < WARNING_INTERVAL_SECONDS):
            return
        self._warned_at, self._is_reported = now, True
        reason = (
            f"{self._name} is switched off ({describe_error(error)}); the run goes on without it and tries again "
            f"every {RETRY_SECONDS:g} s"
        )
        self._warn(Problem("", reason, code="switched-off"))
