"""What everyone else sees of the GPUs: the snapshots that a sampler process tells, or that a recording holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from engine.gpus.snapshot import Reading, Snapshot, Wants
from engine.gpus.start_sampler import start_sampler, started_ahead
from engine.utils.errors import UsageError
from engine.utils.files import expand
from engine.utils.helper_process import HelperExitedError, HelperProcess, HelperTimeoutError

REPLAY = "replay:"
# A sampler that ended is started again after so long, and ever more rarely while there is no driver.
RESTART_SECONDS = 1.0
MOST_RESTART_SECONDS = 60.0
# So long it may be silent before another takes its place.
SILENT_SECONDS = 15.0
END_SECONDS = 0.2


class Monitor(Protocol):
    """Snapshots, as they come."""

    def read(self, seconds: float) -> Snapshot | None:
        """The newest snapshot that came since the last call; waits at most so long for one."""

    def latest(self) -> Snapshot | None:
        """The newest one of all as it looks now: what it tells may have become stale."""

    def close(self) -> None:
        """Waits for nothing."""


def recording_path() -> Path | None:
    """Raises UsageError where $GPUTRAIN_NVML says what is not known."""
    given = os.environ.get("GPUTRAIN_NVML", "")
    if not given:
        return None
    if not given.startswith(REPLAY) or given == REPLAY:
        raise UsageError.one("GPUTRAIN_NVML", f"{given!r} is not known; give replay:FILE, or leave it out")
    return expand(given.removeprefix(REPLAY))


class DriverMonitor:
    """Starts the sampler, reads it, and starts another where it has ended: the driver may be back."""

    def __init__(self, wants: Wants, process: HelperProcess | None = None) -> None:
        self._wants = wants
        self._latest: Snapshot | None = None
        self._process: HelperProcess | None = process or start_sampler(wants.to_line())
        self._started = self._heard = time.monotonic()
        self._pause = RESTART_SECONDS
        self._closed = False

    def _start(self) -> None:
        self._process = start_sampler(self._wants.to_line())
        self._started = self._heard = time.monotonic()

    def read(self, seconds: float) -> Snapshot | None:
        deadline = time.monotonic() + seconds
        while True:
            news = self._drain(max(deadline - time.monotonic(), 0.0))
            if news is None:
                self._restart_where_needed()
            if news is not None or time.monotonic() >= deadline:
                return news

    def _drain(self, seconds: float) -> Snapshot | None:
        if self._process is None:
            time.sleep(min(seconds, 0.1))
            return None
        try:
            line = self._process.read_lines(min(seconds, 0.5))[-1]
        except HelperTimeoutError:
            return None
        except HelperExitedError as error:
            self._process.close(0.0)
            self._process = None
            return self._ended(error.exit_code)
        self._heard = time.monotonic()
        self._latest = Snapshot.from_line(line)
        if self._latest.error is None:
            self._pause = RESTART_SECONDS
        return self._latest

    def _ended(self, code: int | None) -> Snapshot | None:
        """The sampler has ended; where the driver killed it, that is what there is to say."""
        if not code:
            return None
        from engine.utils.exits import signal_name

        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        self._latest = _failed(f"the process that asks the NVIDIA driver {how}")
        return self._latest

    def _restart_where_needed(self) -> None:
        now = time.monotonic()
        if self._closed:
            return
        if self._process is None:
            if now - self._started >= self._pause:
                self._pause = min(2 * self._pause, MOST_RESTART_SECONDS)
                self._start()
        elif now - self._heard > SILENT_SECONDS + self._wants.period:
            # Killed, it may still hang inside the driver: another is started only when it is really gone.
            self._process.kill()
            if self._process.exit_code() is not None:
                self._process = None

    def latest(self) -> Snapshot | None:
        if self._latest is None:
            return None
        # By a clock that nobody sets.
        now = self._latest.time + time.monotonic() - self._heard
        return self._latest.silent(now, self._wants.patience)

    def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.close(END_SECONDS)


def open_monitor(wants: Wants) -> Monitor:
    """Of this host's driver, or of the recording that $GPUTRAIN_NVML names (`replay:FILE`). Raises UsageError."""
    path = recording_path()
    if path is not None:
        from engine.gpus.recording import RecordingMonitor

        return RecordingMonitor(path, wants.patience)
    ahead = started_ahead()
    if ahead is not None and wants != Wants():
        # It has perhaps answered already, and not to this.
        ahead.close(END_SECONDS)
        ahead = None
    return DriverMonitor(wants, ahead)


def _failed(error: str) -> Snapshot:
    unknown: Reading[str] = Reading(None, time.time(), error)
    return Snapshot(time.time(), os.uname().nodename, unknown, unknown, (), error)
