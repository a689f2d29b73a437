"""Runs of several users that wait for GPUs in the real queue, without a training: they hold their GPUs for a while.

Each run is a forked process that claims a run folder, takes its place in the queue and reserves devices with the code
of the product. It appends what happens to one log that all users share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.gpus import allocation
from engine.gpus.snapshot import Snapshot
from engine.jobs.launch.phases import EndedBeforeStartError, grant_allocated
from engine.jobs.launch.request import RunRequest
from engine.jobs.queue.place import CancelledError
from engine.jobs.queue.state import QueueStage
from engine.runs.events import RunFinished
from support.runs.run_owner import Owner


def become_user(uid: int) -> None:
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


class StillMonitor:
    """Stands for the sampler process: the GPUs of a snapshot, which never change."""

    def __init__(self, snapshot: Snapshot, period_s: float) -> None:
        self._snapshot, self._period_s = snapshot, period_s

    def read(self, timeout_s: float) -> Snapshot:
        time.sleep(min(timeout_s, self._period_s))
        return self._snapshot

    def latest(self) -> Snapshot:
        return self._snapshot

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class QueuedUserRun:
    """A run of a user: it wants `gpus` and holds them for `seconds`."""

    name: str
    uid: int
    gpus: int
    seconds: float
    share: int = 1

    def config(self) -> Config:
        values = {
            "run": {"name": self.name, "resume": True},
            "device": {"gpus": f"free:{self.gpus}", "wait": True},
            "queue": {"share": self.share},
        }
        return Config.model_validate(values)


@dataclass
class SharedHost:
    """A host with GPUs whose users start runs. `snapshot` replaces the driver; None queries it."""

    folder: Path
    snapshot: Snapshot | None = None
    period_s: float = 0.05
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    def runs_dir(self, uid: int) -> Path:
        return self.folder / f"runs-{uid}"

    def prepare(self, uids: list[int]) -> None:
        (self.folder / "reservations").mkdir(exist_ok=True)
        (self.folder / "reservations").chmod(0o1777)
        self.log.touch()
        self.log.chmod(0o666)
        for uid in uids:
            self.runs_dir(uid).mkdir()
            os.chown(self.runs_dir(uid), uid, -1)

    def start(self, run: QueuedUserRun) -> None:
        """Start the process of a run, and return once it is in the queue or has its GPUs."""
        seen = len(self.events())
        self.pids[run.name] = in_child(run.uid, lambda: self._run(run))
        while not any(event["run"] == run.name for event in self.events()[seen:]):
            assert not self.reap(run.name), f"{run.name} exited at once"
            time.sleep(0.01)

    def _run(self, run: QueuedUserRun) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if (snapshot := self.snapshot) is not None:
            allocation.has_driver_library = lambda: True  # type: ignore[attr-defined]
            allocation.DriverMonitor = lambda options: StillMonitor(snapshot, self.period_s)  # type: ignore[assignment,misc]
            allocation.gpus_unknown_to_nvml = lambda snapshot: []
        owned = Owner(RunRequest(run.config(), self.runs_dir(run.uid), run.name))
        with suppress(EndedBeforeStartError), owned.held:
            self._wait_and_run(run, owned)

    def _wait_and_run(self, run: QueuedUserRun, owned: Owner) -> None:
        queued, waiting = owned.queue(), False

        def on_wait(reason: str) -> None:
            nonlocal waiting
            queued.place.report(reason)
            if not waiting:
                waiting = True
                self.write("waits", run)

        try:
            allocated = allocation.allocate_devices(
                f"free:{run.gpus}",
                run.name,
                wait=True,
                on_wait=on_wait,
                poll_terms=queued.place.poll_terms,
            )
        except CancelledError:
            self.write("cancelled", run)
            raise
        devices = [device.index for device in allocated.devices]
        self.write("starts", run, devices=devices, arrived=allocated.reservation.since)
        grant_allocated(owned.requested, allocated, queued)
        time.sleep(run.seconds)
        queued.place.save(stage=QueueStage.STARTED)
        queued.claimed.recorder.record(RunFinished(state="finished"))
        self.write("ends", run)

    def write(self, event: str, run: QueuedUserRun, **values: Any) -> None:
        line = json.dumps({"time": time.time(), "event": event, "run": run.name, "uid": run.uid} | values) + "\n"
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        os.write(handle, line.encode())
        os.close(handle)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def reap(self, name: str) -> bool:
        """Whether the process of a run has ended."""
        pid = self.pids.get(name)
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0]:
            del self.pids[name]
        return name not in self.pids

    def kill(self, run: QueuedUserRun) -> None:
        """Kill the process of a run; what it holds is free from then on."""
        if run.name in self.pids:
            pid = self.pids.pop(run.name)
            # Stopped first: the run that takes its place starts after it was killed, in the log too.
            os.kill(pid, signal.SIGSTOP)
            _, status = os.waitpid(pid, os.WUNTRACED)
            self.write("killed", run)
            if os.WIFSTOPPED(status):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def kill_all(self) -> None:
        # Stopped first: a run that outlives the one before it by a moment would start.
        for stop_signal in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids.values():
                os.kill(pid, stop_signal)
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        self.pids.clear()


def in_child(uid: int, action: Callable[[], None]) -> int:
    """Run `action` in a forked process as a user, and return its PID."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            become_user(uid)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def gpu_intervals(events: list[dict[str, Any]]) -> dict[int, list[tuple[float, float, str]]]:
    """Return for each GPU when which run held it: (start, end, run)."""
    intervals: dict[int, list[tuple[float, float, str]]] = {}
    held: dict[str, tuple[float, list[int]]] = {}
    for event in events:
        if event["event"] == "starts":
            held[event["run"]] = event["time"], event["devices"]
        elif event["event"] in ("ends", "killed") and event["run"] in held:
            start, devices = held.pop(event["run"])
            for device in devices:
                intervals.setdefault(device, []).append((start, event["time"], event["run"]))
    assert not held, f"{sorted(held)} never released their GPUs"
    return intervals


def double_bookings(events: list[dict[str, Any]]) -> list[str]:
    """Return the pairs of runs that held a GPU at the same time."""
    found = []
    for device, spans in gpu_intervals(events).items():
        for first, second in zip(sorted(spans), sorted(spans)[1:], strict=False):
            if second[0] < first[1]:
                found.append(f"GPU {device}: {first[2]} and {second[2]}")
    return found


def overtakings(events: list[dict[str, Any]], tolerance_s: float) -> list[str]:
    """Return the runs that started more than `tolerance_s` before one that had arrived earlier."""
    starts = [event for event in events if event["event"] == "starts"]
    return [
        f"{later['run']} before {earlier['run']} by {earlier['time'] - later['time']:.1f} s"
        for earlier in starts
        for later in starts
        if earlier["arrived"] < later["arrived"] and later["time"] < earlier["time"] - tolerance_s
    ]
