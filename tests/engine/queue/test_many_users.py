"""The queue of a host with four GPUs and two users, with kills and a reboot: no GPU has two runs, first come first
served."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.gpus.run_queue import CLAIM_TIMEOUT_SECONDS
from engine.gpus.snapshot import Reading, Snapshot
from engine.queue.listing import interrupted_rows
from engine.utils.codec import decode, replace
from support.gputrain_command import ROOT, wait_for
from support.runs.queue_users import QueuedUserRun, SharedHost, double_bookings, in_child, overtakings

SOMEONE, SOMEBODY = 12345, 12346
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
    nothing = {"processes": Reading((), snapshot.time), "memory_used": Reading(0, snapshot.time)}
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


@needs_root
def test_runs_share_one_gpu_up_to_their_number(host: SharedHost) -> None:
    blocker = QueuedUserRun("blocker", 0, 3, 60.0)
    runs = [QueuedUserRun(f"small-{index}", (0, SOMEONE)[index % 2], 1, 60.0, share=2) for index in range(3)]
    for run in (blocker, *runs):
        host.start(run)
    events = {event["run"]: event for event in host.events()}
    assert events["small-0"]["devices"] == events["small-1"]["devices"]
    assert events["small-2"]["event"] == "waits"
    host.kill(runs[0])
    wait_for(lambda: host.events()[-1]["event"] == "starts", "the third run to take the place of the first", 30)
    assert host.events()[-1]["devices"] == events["small-0"]["devices"]


@needs_root
def test_run_does_not_join_gpu_that_a_run_ahead_waits_for(host: SharedHost) -> None:
    small, whole = QueuedUserRun("small", 0, 1, 60.0, share=4), QueuedUserRun("whole", SOMEONE, 4, 60.0)
    later = QueuedUserRun("later", 0, 1, 60.0, share=4)
    for run in (small, whole, later):
        host.start(run)
    assert [event["event"] for event in host.events()] == ["starts", "waits", "waits"]


@needs_root
@pytest.mark.soak
def test_thirty_runs_of_two_users_with_kills_and_reboot(host: SharedHost) -> None:
    rng = random.Random(20)  # noqa: S311 (reproducible)
    runs = [
        QueuedUserRun(f"run-{index:02}", rng.choice((0, SOMEONE)), rng.choice((1, 1, 2, 2, 3, 4)), rng.uniform(0.5, 4))
        for index in range(30)
    ]
    killed: list[QueuedUserRun] = []
    for index, run in enumerate(runs):
        host.start(run)
        time.sleep(rng.uniform(0, 0.5))
        if index % 6 == 5 and (live := [each for each in runs[: index + 1] if not host.reap(each.name)]):
            killed.append(rng.choice(live))
            host.kill(killed[-1])
    # The host loses its power: processes and /tmp are gone.
    at_reboot = [run for run in runs if not host.reap(run.name)]
    for run in at_reboot:
        host.kill(run)
    shutil.rmtree(host.folder / "reservations")
    host.prepare([])
    rebooted = len(host.events())
    again = {row.name for uid in (0, SOMEONE) for row in _interrupted(host, uid)}
    by_name = {run.name: run for run in runs}
    queues = [[by_name[row.name] for row in _interrupted(host, uid)] for uid in (0, SOMEONE)]
    for pair in zip(*queues, strict=False):
        for run in pair:
            host.start(run)
    for run in (*queues[0][len(queues[1]) :], *queues[1][len(queues[0]) :]):
        host.start(run)
    wait_for_all(host, runs, 200)
    events = host.events()
    ended = [event["run"] for event in events if event["event"] == "ends"]
    assert sorted(ended) == sorted(run.name for run in runs)
    assert double_bookings(events) == []
    assert overtakings(events[:rebooted], TOLERANCE_SECONDS) == []
    assert overtakings(events[rebooted:], TOLERANCE_SECONDS) == []
    idle = longest_idle(events[rebooted:], by_name)
    print(
        f"{len(again)} of 30 runs interrupted by {len(killed)} kills and the reboot; longest time that GPUs stayed "
        f"free although the head of the queue fitted: {idle:.2f} s"
    )
    assert idle < TOLERANCE_SECONDS


def burn() -> None:
    while True:
        pass


@needs_root
@pytest.mark.nightly
@pytest.mark.parametrize("round_number", range(10))
def test_twenty_runs_of_three_users_on_a_loaded_host(host: SharedHost, round_number: int) -> None:
    rng = random.Random(round_number)  # noqa: S311 (reproducible)
    host.prepare([SOMEBODY])
    users = (0, SOMEONE, SOMEBODY)
    runs = [
        QueuedUserRun(f"run-{index:02}", users[index % 3], rng.choice((1, 1, 2, 3, 4)), rng.uniform(0.1, 1.0))
        for index in range(20)
    ]
    burning = [in_child(0, burn) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        for run in runs:
            host.start(run)
        wait_for_all(host, runs, 300)
    finally:
        for pid in burning:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    events = host.events()
    assert sorted(event["run"] for event in events if event["event"] == "ends") == [run.name for run in runs]
    assert double_bookings(events) == []
    assert overtakings(events, CLAIM_TIMEOUT_SECONDS) == []


def _interrupted(host: SharedHost, uid: int) -> list[Any]:
    """Return the interrupted runs as their user sees them."""
    report = host.folder / f"interrupted-{uid}.json"
    report.touch()
    os.chown(report, uid, -1)

    def write() -> None:
        report.write_text(json.dumps([row.name for row in interrupted_rows(host.runs_dir(uid))]))

    os.waitpid(in_child(uid, write), 0)
    return [SimpleNamespace(name=name) for name in json.loads(report.read_text())]


def longest_idle(events: list[dict[str, Any]], runs: dict[str, QueuedUserRun]) -> float:
    """Return the longest time for which enough GPUs for the head of the queue were free while it waited."""
    queue, longest = list[str](), 0.0
    since: float | None = None
    held: dict[str, int] = {}
    for event in events:
        if since is not None:
            longest = max(longest, event["time"] - since)
        name = event["run"]
        if event["event"] == "waits":
            queue.append(name)
        elif event["event"] == "starts":
            queue = [each for each in queue if each != name]
            held[name] = runs[name].gpus
        else:
            queue = [each for each in queue if each != name]
            held.pop(name, None)
        fits = bool(queue) and runs[queue[0]].gpus <= 4 - sum(held.values())
        since = None if not fits else since if since is not None and event["event"] == "waits" else event["time"]
    return longest
