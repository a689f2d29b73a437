"""What everyone else sees of the GPUs: the snapshots that a sampler process tells, or that a recording holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from engine.gpus.snapshot import Reading, SamplerOptions, Snapshot
from engine.gpus.start_sampler import start_sampler, take_prestarted_sampler
from engine.utils.errors import UsageError
from engine.utils.files import expand_user
from engine.utils.helper_process import HelperExitedError, HelperProcess, HelperTimeoutError

REPLAY_PREFIX = "replay:"
# A sampler that ended is started again after so long, and ever more rarely while there is no driver.
RESTART_DELAY_SECONDS = 1.0
MAX_RESTART_DELAY_SECONDS = 60.0
# So long it may be silent before another takes its place.
UNRESPONSIVE_SECONDS = 15.0
KILL_WAIT_SECONDS = 0.2


class GpuMonitor(Protocol):
    """Snapshots, as they come."""

    def read(self, timeout_s: float) -> Snapshot | None:
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
    if not given.startswith(REPLAY_PREFIX) or given == REPLAY_PREFIX:
        raise UsageError.one("GPUTRAIN_NVML", f"{given!r} is not known; give replay:FILE, or leave it out")
    return expand_user(given.removeprefix(REPLAY_PREFIX))


class DriverMonitor:
    """Starts the sampler, reads it, and starts another where it has ended: the driver may be back."""

    def __init__(self, options: SamplerOptions, process: HelperProcess | None = None) -> None:
        self._options = options
        self._latest: Snapshot | None = None
        self._process: HelperProcess | None = process or start_sampler(options.to_line())
        self._started_at = self._last_received_at = time.monotonic()
        self._restart_delay_s = RESTART_DELAY_SECONDS
        self._closed = False

    def _start(self) -> None:
        self._process = start_sampler(self._options.to_line())
        self._started_at = self._last_received_at = time.monotonic()

    def read(self, timeout_s: float) -> Snapshot | None:
        deadline = time.monotonic() + timeout_s
        while True:
            news = self._receive(max(deadline - time.monotonic(), 0.0))
            if news is None:
                self._restart_if_needed()
            if news is not None or time.monotonic() >= deadline:
                return news

    def _receive(self, timeout_s: float) -> Snapshot | None:
        if self._process is None:
            time.sleep(min(timeout_s, 0.1))
            return None
        try:
            line = self._process.read_lines(min(timeout_s, 0.5))[-1]
        except HelperTimeoutError:
            return None
        except HelperExitedError as error:
            self._process.close(0.0)
            self._process = None
            return self._ended(error.exit_code)
        self._last_received_at = time.monotonic()
        self._latest = Snapshot.from_line(line)
        if self._latest.error is None:
            self._restart_delay_s = RESTART_DELAY_SECONDS
        return self._latest

    def _ended(self, code: int | None) -> Snapshot | None:
        """The sampler has ended; where the driver killed it, that is what there is to say."""
        if not code:
            return None
        from engine.utils.exits import signal_name

        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        self._latest = _error_snapshot(f"the process that asks the NVIDIA driver {how}")
        return self._latest

    def _restart_if_needed(self) -> None:
        now = time.monotonic()
        if self._closed:
            return
        if self._process is None:
            if now - self._started_at >= self._restart_delay_s:
                self._restart_delay_s = min(2 * self._restart_delay_s, MAX_RESTART_DELAY_SECONDS)
                self._start()
        elif now - self._last_received_at > UNRESPONSIVE_SECONDS + self._options.period:
            # Killed, it may still hang inside the driver: another is started only when it is really gone.
            self._process.kill()
            if self._process.exit_code() is not None:
                self._process = None

    def latest(self) -> Snapshot | None:
        if self._latest is None:
            return None
        # By a clock that nobody sets.
        now = self._latest.time + time.monotonic() - self._last_received_at
        return self._latest.as_of(now, self._options.stale_after_s)

    def close(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            process.close(KILL_WAIT_SECONDS)


def open_monitor(options: SamplerOptions) -> GpuMonitor:
    """Of this host's driver, or of the recording that $GPUTRAIN_NVML names (`replay:FILE`). Raises UsageError."""
    path = recording_path()
    if path is not None:
        from engine.gpus.recording import RecordingMonitor

        return RecordingMonitor(path, options.stale_after_s)
    ahead = take_prestarted_sampler()
    if ahead is not None and options != SamplerOptions():
        # It has perhaps answered already, and not to this.
        ahead.close(KILL_WAIT_SECONDS)
        ahead = None
    return DriverMonitor(options, ahead)


def _error_snapshot(error: str) -> Snapshot:
    unknown: Reading[str] = Reading(None, time.time(), error)
    return Snapshot(time.time(), os.uname().nodename, unknown, unknown, (), error)
