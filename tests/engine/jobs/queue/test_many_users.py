"""The queue of a host with four GPUs and two users, with kills and a reboot: no GPU has two runs, first come first
served."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.codec import decode, replace
from engine.gpus.snapshot import Measurement, Snapshot
from engine.jobs.queue.listing import interrupted_rows
from support.gputrain_command import ROOT, wait_for
from support.runs.queue_users import QueuedUserRun, SharedHost, double_bookings, overtakings

SOMEONE = 12345
# A poll of a run takes as long as the made-up monitor answers; a host under load is slower.
TOLERANCE_SECONDS = 5.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedHost]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(folder / "reservations"))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        shared = SharedHost(folder, four_gpus())
        shared.prepare([0, SOMEONE])
        yield shared
        shared.kill_all()


def four_gpus() -> Snapshot:
    """Four free GPUs of the recorded host."""
    with (ROOT / "tests/recordings/eight-gpus.jsonl").open() as recording:
        snapshot = decode(recording.readline(), Snapshot)
    nothing = {"processes": Measurement((), snapshot.time), "memory_used": Measurement(0, snapshot.time)}
    return replace(snapshot, gpus=tuple(replace(gpu, **nothing) for gpu in snapshot.gpus[:4]))


def wait_for_all(host: SharedHost, runs: list[QueuedUserRun], seconds: float) -> None:
    wait_for(lambda: all(host.reap(run.name) for run in runs), f"the end of {sorted(host.pids)}", seconds)


def wait_until_waiting(host: SharedHost, run: QueuedUserRun) -> None:
    def is_waiting() -> bool:
        return any(event["run"] == run.name and event["event"] == "waits" for event in host.events())

    wait_for(is_waiting, f"{run.name} to wait", 30)


@needs_root
def test_queue_of_two_users_serves_arrivals_in_order_and_releases_killed_runs(host: SharedHost) -> None:
    holder = QueuedUserRun("holder", 0, 4, 60.0)
    runs = [QueuedUserRun(f"run-{index}", (0, SOMEONE)[index % 2], 1 + index % 3, 0.1) for index in range(6)]
    for run in (holder, *runs):
        host.start(run)
    host.kill(runs[2])
    host.kill(holder)
    wait_for_all(host, [holder, *runs], 60)
    events = host.events()
    started = [event["run"] for event in events if event["event"] == "starts"]
    assert sorted(started) == sorted({"holder", *(run.name for run in runs)} - {"run-2"})
    assert double_bookings(events) == []
    assert overtakings(events, TOLERANCE_SECONDS) == []
    assert list((host.folder / "reservations").glob("gputrain-*/*.json")) == []


@needs_root
def test_runs_interrupted_by_reboot_start_again_in_their_old_order(host: SharedHost) -> None:
    holder = QueuedUserRun("holder", 0, 4, 60.0)
    runs = [QueuedUserRun(name, 0, 4, 0.1) for name in ("b", "a", "c")]
    for run in (holder, *runs):
        host.start(run)
    for run in runs:
        wait_until_waiting(host, run)
    host.kill_all()
    shutil.rmtree(host.folder / "reservations")
    host.prepare([])
    host.write("killed", holder)
    order = [row.name for row in interrupted_rows(host.runs_dir(0))]
    assert order == ["holder", "b", "a", "c"]
    for run in runs:
        host.start(run)
    wait_for_all(host, runs, 60)
    started = [event["run"] for event in host.events() if event["event"] == "starts"]
    assert started == ["holder", "b", "a", "c"]
