"""Source of GPU snapshots for the rest of gputrain: the sampler process, or a recording.

`open_monitor` chooses between them. `allocation`, `engine.jobs.launch.gpu_usage`, `engine.jobs.doctor` and the user
interface read snapshots from here.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from engine.base.codec import decode, encode, replace
from engine.base.errors import UsageError
from engine.base.files import expand_user
from engine.base.helper_process import HelperExitedError, HelperProcess, HelperTimeoutError
from engine.gpus.snapshot import DRIVER, Measurement, SamplerOptions, Snapshot, current_time
from engine.gpus.start_sampler import start_sampler, take_prestarted_sampler

REPLAY_PREFIX = "replay:"
# The restart delay of a sampler that exited doubles from the first to the second while the driver fails. Without one, a
# sampler starts when the library of a driver appears: a start takes 0.3 s of CPU time.
RESTART_DELAY_SECONDS = 1.0
MAX_RESTART_DELAY_SECONDS = 60.0
NO_DRIVER_DELAY_SECONDS = 600.0
UNRESPONSIVE_SECONDS = 15.0  # silence after which the sampler is killed and restarted
KILL_WAIT_SECONDS = 0.2
FIRST_SNAPSHOT_TIMEOUT_SECONDS = 30.0  # without persistence mode, the driver initializes the GPUs first
ALL_GPUS_TIMEOUT_SECONDS = 5.0  # for every GPU to answer, if at least one has
NEXT_SNAPSHOT_TIMEOUT_SECONDS = 1.0


class GpuMonitor(Protocol):
    """A stream of GPU snapshots."""

    def read(self, timeout_s: float) -> Snapshot | None:
        """Return the newest snapshot since the last call, waiting up to `timeout_s` for one. None if there is none."""

    def latest(self) -> Snapshot | None:
        """Return the last snapshot aged to now, so its GPUs may have become stale. None before the first snapshot."""

    def set_period(self, period_s: float) -> None:
        """Change the time between snapshots. The next one comes at once."""

    def close(self) -> None:
        """Release all resources without waiting for the driver."""


def recording_path() -> Path | None:
    """Return the recording that $GPUTRAIN_NVML selects, or None. Raises UsageError if its value is invalid."""
    value = os.environ.get("GPUTRAIN_NVML", "")
    if not value:
        return None
    if not value.startswith(REPLAY_PREFIX) or value == REPLAY_PREFIX:
        raise UsageError.one(
            "GPUTRAIN_NVML",
            f"{value!r} is not allowed: must be replay:FILE; unset it to query the driver",
            code="invalid-value",
        )
    return expand_user(value.removeprefix(REPLAY_PREFIX))


class DriverMonitor:
    """Reads snapshots from a sampler process, and restarts it when it exits, because the driver may be reloaded."""

    def __init__(self, options: SamplerOptions, process: HelperProcess | None = None) -> None:
        self._options = options
        self._latest: Snapshot | None = None
        self._process: HelperProcess | None = process or start_sampler(encode(options).decode())
        self._started_at = self._last_received_at = time.monotonic()
        self._restart_delay_s = RESTART_DELAY_SECONDS
        self._closed = False

    def _start(self) -> None:
        self._process = start_sampler(encode(self._options).decode())
        self._started_at = self._last_received_at = time.monotonic()

    def read(self, timeout_s: float) -> Snapshot | None:
        deadline = time.monotonic() + timeout_s
        while True:
            snapshot = self._receive(max(deadline - time.monotonic(), 0.0))
            if snapshot is None:
                self._restart_if_needed()
            if snapshot is not None or time.monotonic() >= deadline:
                return snapshot

    def _receive(self, timeout_s: float) -> Snapshot | None:
        if self._process is None:
            time.sleep(timeout_s)
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
        self._latest = decode(line, Snapshot)
        if self._latest.error is None:
            self._restart_delay_s = RESTART_DELAY_SECONDS
        return self._latest

    def _ended(self, code: int | None) -> Snapshot | None:
        """Return an error snapshot if the sampler crashed, None if it exited normally."""
        if not code:
            return None
        from engine.base.exits import exit_status

        self._latest = _error_snapshot(f"the process that queries the NVIDIA driver {exit_status(code)}")
        return self._latest

    def _restart_if_needed(self) -> None:
        now = time.monotonic()
        if self._closed:
            return
        if self._process is None:
            # Not needed for the first snapshot.
            from engine.gpus.driver import has_driver_library

            delay_s = self._restart_delay_s if has_driver_library() else NO_DRIVER_DELAY_SECONDS
            if now - self._started_at >= delay_s:
                self._restart_delay_s = min(2 * self._restart_delay_s, MAX_RESTART_DELAY_SECONDS)
                self._start()
        elif now - self._last_received_at > UNRESPONSIVE_SECONDS + self._options.period:
            # A killed process may still hang inside the driver. A new one starts only after it has exited.
            self._process.kill()
            if self._process.exit_code() is not None:
                self._process = None

    def latest(self) -> Snapshot | None:
        if self._latest is None:
            return None
        # The monotonic clock is immune to changes of the system time.
        now = self._latest.time + time.monotonic() - self._last_received_at
        return self._latest.as_of(now, self._options.stale_after_s)

    def set_period(self, period_s: float) -> None:
        self._options = replace(self._options, period=period_s)
        if self._process is not None:
            self._process.send(self._options)

    def rest(self) -> None:
        """End the sampler until the next `read`."""
        process, self._process = self._process, None
        if process is not None:
            process.close(KILL_WAIT_SECONDS)

    def close(self) -> None:
        self._closed = True
        self.rest()


def open_monitor(options: SamplerOptions) -> GpuMonitor:
    """Open a monitor of this host's GPUs, or of the recording that $GPUTRAIN_NVML names (`replay:FILE`).

    Raises UsageError if $GPUTRAIN_NVML or the recording is invalid.
    """
    path = recording_path()
    if path is not None:
        from engine.gpus.recording import RecordingMonitor

        return RecordingMonitor(path, options.stale_after_s)
    prestarted = take_prestarted_sampler()
    if prestarted is not None and options != SamplerOptions():
        # The prestarted sampler uses default options and may already have printed snapshots with them.
        prestarted.close(KILL_WAIT_SECONDS)
        prestarted = None
    return DriverMonitor(options, prestarted)


def _error_snapshot(error: str) -> Snapshot:
    now = current_time()
    unknown: Measurement[str] = Measurement(None, now, error)
    return Snapshot(
        time=now, source=DRIVER, host=os.uname().nodename, driver=unknown, cuda=unknown, error=error, gpus=()
    )


def first_snapshot(monitor: GpuMonitor, timeout_s: float = FIRST_SNAPSHOT_TIMEOUT_SECONDS) -> Snapshot | None:
    """Return the first snapshot in which all GPUs have answered, or the latest one after a timeout.

    `timeout_s` is the timeout for the driver. Return None if there was no snapshot at all.
    """
    began = time.monotonic()
    snapshot = monitor.read(timeout_s)
    while snapshot is not None and snapshot.pending:
        if time.monotonic() - began > (ALL_GPUS_TIMEOUT_SECONDS if snapshot.gpus else timeout_s):
            break
        snapshot = monitor.read(NEXT_SNAPSHOT_TIMEOUT_SECONDS) or snapshot
    return snapshot
