"""Detached runs that sleep while they wait: what wakes them, what they keep, and who takes the place of their
leader."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.gpus.sleeper import Leadership, try_to_lead
from engine.runs.folder import RunFolder
from engine.utils.process import process_start_ticks
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line
from support.gputrain_command import Gputrain, wait_for


class Queue:
    """Runs behind one that holds the only GPU."""

    def __init__(self, gputrain: Gputrain, host: FakeGpuHost) -> None:
        host.set_scene(gpu_line(0, used=1000))
        gputrain.environment |= host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
        self.gputrain, self.reservations = gputrain, host.folder / "reservations"
        self.add("holder", "600")

    def add(self, name: str, seconds: str = "0", *options: str) -> None:
        words = ["--gpus", "free:1", "--queue", "--detach", *options, "--", "sleep", seconds]
        assert self.gputrain("run", "--name", name, *words).returncode == 0

    def folder(self, name: str) -> RunFolder:
        return RunFolder(self.gputrain.runs / name)

    def pid(self, name: str) -> int:
        pid: int = json.loads(self.folder(name).owner.read_text())["pid"]
        return pid

    def sleeps(self, name: str) -> bool:
        return b"sleeper." in Path(f"/proc/{self.pid(name)}/cmdline").read_bytes()

    def state(self, name: str) -> str:
        return str(json.loads(self.folder(name).summary.read_text())["state"])

    def wait_until_asleep(self, *names: str) -> None:
        wait_for(lambda: all(self.sleeps(name) for name in names), f"{names} to sleep", 60)

    def wait_until(self, name: str, state: str) -> None:
        wait_for(lambda: self.state(name) == state, f"{name} to be {state}", 60)

    def listed(self) -> list[str]:
        rows = json.loads(self.gputrain("queue", "--json").stdout)["queue"]
        return [row["name"] for row in rows]


@pytest.fixture
def queue(gputrain: Gputrain, gpu_host: FakeGpuHost) -> Iterator[Queue]:
    queue = Queue(gputrain, gpu_host)
    yield queue
    for folder in gputrain.runs.iterdir():
        claim = json.loads((folder / "owner.json").read_text())
        if claim["start_ticks"] == process_start_ticks(claim["pid"]):
            os.kill(claim["pid"], signal.SIGTERM)


def test_sleeping_runs_keep_their_order_and_start_when_a_gpu_is_free(queue: Queue) -> None:
    for name in ("a", "b", "c"):
        queue.add(name)
    queue.wait_until_asleep("b", "c")
    pids = [queue.pid(name) for name in ("b", "c")]
    assert queue.listed() == ["a", "b", "c"] and not queue.sleeps("a")
    queue.gputrain("stop", "holder")
    for name in ("a", "b", "c"):
        queue.wait_until(name, "finished")
    assert [queue.pid(name) for name in ("b", "c")] == pids
    started = [queue.folder(name).history().command for name in ("a", "b", "c")]
    times = [event.time for event in started if event is not None]
    assert times == sorted(times) and len(times) == 3
    wait_for(lambda: not list(queue.reservations.iterdir()), "the folders of the reservations to be removed", 20)


def test_sleeping_run_takes_requests_and_keeps_its_entry(queue: Queue) -> None:
    for name in ("a", "b"):
        queue.add(name)
    queue.wait_until_asleep("b")
    assert "b is held" in queue.gputrain("queue", "hold", "b").stderr
    queue.wait_until_asleep("b")
    (queue.reservations / f"gputrain-{os.getuid()}").rename(queue.reservations / "gone")
    wait_for(lambda: {"a", "b"} <= {*queue.listed()}, "the runs to write their entries again", 150)
    assert queue.gputrain("stop", "b").returncode == 0
    assert queue.state("b") == "stopped"


def test_sleeping_run_ends_on_sigterm_as_one_that_is_awake(queue: Queue) -> None:
    for name in ("a", "b"):
        queue.add(name)
    queue.wait_until_asleep("b")
    os.kill(queue.pid("b"), signal.SIGTERM)
    wait_for(lambda: not queue.folder("b").is_owned(), "the end of b", 60)
    assert "interrupted by a signal" in queue.folder("b").log.read_text()
    assert queue.listed() == ["a", "b"]


def test_run_that_waits_for_another_wakes_at_its_end(queue: Queue) -> None:
    queue.gputrain("stop", "holder")
    queue.add("first", "600")
    queue.add("after", "0", "--after", "first:any")
    queue.wait_until_asleep("after")
    queue.gputrain("stop", "first")
    queue.wait_until("after", "finished")


def test_another_run_leads_when_the_leader_is_killed(queue: Queue) -> None:
    for name in ("a", "b", "c"):
        queue.add(name)
    queue.wait_until_asleep("b", "c")
    os.kill(queue.pid("a"), signal.SIGKILL)
    wait_for(lambda: queue.sleeps("b") != queue.sleeps("c"), "b or c to wake", 60)
    queue.gputrain("stop", "holder")
    for name in ("b", "c"):
        queue.wait_until(name, "finished")


def test_leader_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "leader")
    first = try_to_lead(path)
    assert isinstance(first, Leadership) and first.renew(path)
    assert try_to_lead(path) is None
    os.utime(path, (1, 1))
    second = try_to_lead(path)
    assert second is not None and second.renew(path) and not first.renew(path)
    first.close(path)
    assert second.renew(path)
    second.close(path)
    assert list(tmp_path.iterdir()) == []
