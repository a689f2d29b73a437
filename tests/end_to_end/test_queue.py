"""`gputrain run --detach` and `gputrain queue`: runs that wait in the background, and what changes their place."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.gpus.reservation import Reservation
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, gpu_uuid
from support.gputrain_command import Gputrain, wait_for
from support.messages import says

CPU_RUN = ["digits", "--gpus", "cpu", "--ranks", "1", "--epochs", "1", "--model", "linear"]


@pytest.fixture
def busy_host(gputrain: Gputrain, gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> Gputrain:
    """A host whose only GPU is reserved by another run, for as long as the test takes."""
    gpu_host.set_scene([gpu_line(0)])
    gputrain.environment |= gpu_host.environment | {"CUDA_VISIBLE_DEVICES": "0"}
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", gpu_host.environment["GPUTRAIN_RESERVATIONS"])
    holder = Reservation()
    holder.reserve([gpu_uuid(0)], "0", [gpu_uuid(0)], "holder")
    return gputrain


def run_state(gputrain: Gputrain, name: str) -> str:
    rows = json.loads(gputrain("runs", "--json").stdout)["runs"]
    return next(str(row["state"]) for row in rows if row["name"] == name)


def is_failed(gputrain: Gputrain, name: str) -> bool:
    return run_state(gputrain, name) == "failed"


@pytest.mark.nightly
def test_detached_run_that_is_held_says_so_with_the_command_that_goes_on(gputrain: Gputrain) -> None:
    line = ["run", "--gpus", "cpu", "--queue", "--detach", "--", "sh", "-c", "echo no such file; exit 1"]
    for name in (gputrain(*line).stdout.strip(), gputrain(*line).stdout.strip()):
        wait_for(partial(is_failed, gputrain, name), "the failure of the command")
    held = gputrain(*line)
    name = held.stdout.strip()
    assert held.returncode == 0
    assert held.stderr.startswith(f"{name} waits: held: ") and f"`gputrain queue release {name}`" in held.stderr
    assert "no such file" in held.stderr and held.stderr.count("\n") == 1
    assert gputrain("stop", name).returncode == 0


def test_refused_detached_run_leaves_nothing(busy_host: Gputrain) -> None:
    busy = busy_host("run", "digits", "--gpus", "free:1", "--detach")
    assert busy.returncode == 2
    assert says(busy.stderr, "gpu-in-use", "GPU 0: reserved by run holder")
    missing = busy_host("run", *CPU_RUN, "--detach", "--after", "nix")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert says(missing.stderr, "unknown-run", "error: queue.after: nix: ")
    assert not busy_host.runs.exists()


def start_waiting(gputrain: Gputrain, name: str) -> None:
    started = gputrain("run", "digits", "--gpus", "free:1", "--queue", "--detach", "--name", name)
    assert (started.returncode, started.stdout) == (0, f"{name}\n"), started.stderr


def queue_rows(gputrain: Gputrain) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(gputrain("queue", "--json").stdout)["queue"]
    return rows


def owner_pid(run: Path) -> int:
    return int(json.loads((run / "owner.json").read_text())["pid"])


@pytest.mark.nightly
def test_detached_runs_wait_in_order_and_obey_requests(busy_host: Gputrain) -> None:
    for name in ("a", "b"):
        start_waiting(busy_host, name)
    rows = queue_rows(busy_host)
    assert [(row["name"], row["place"], row["state"]) for row in rows] == [("a", 1, "waiting"), ("b", 2, "waiting")]
    wait_for(lambda: "reserved by run holder" in queue_rows(busy_host)[0]["reason"], "the reason of the first run")
    assert busy_host("queue", "move", "b", "--first").stderr == "b is moved.\n"
    assert [row["name"] for row in queue_rows(busy_host)] == ["b", "a"]
    assert busy_host("queue", "hold", "b").stderr == "b is held.\n"
    assert [(row["name"], row["place"]) for row in queue_rows(busy_host)] == [("a", 1), ("b", None)]
    assert busy_host("stop", "b").stderr == "b is stopped.\n"
    assert run_state(busy_host, "b") == "stopped"
    # A host that goes down sends SIGTERM, or nothing at all.
    start_waiting(busy_host, "c")
    for name, number in (("a", signal.SIGKILL), ("c", signal.SIGTERM)):
        os.kill(owner_pid(busy_host.runs / name), number)
    wait_for(lambda: {row["state"] for row in queue_rows(busy_host)} == {"interrupted"}, "the end of both runs")
    assert run_state(busy_host, "a") == "interrupted"
    resumed = busy_host("queue", "resume")
    assert (resumed.returncode, resumed.stdout) == (0, "a\nc\n"), resumed.stderr
    assert [(row["name"], row["place"]) for row in queue_rows(busy_host)] == [("a", 1), ("c", 2)]
    for name in ("a", "c"):
        assert busy_host("stop", name).stderr == f"{name} is stopped.\n"
    assert queue_rows(busy_host) == []
    refused = busy_host("queue", "hold", "a").stderr
    assert says(refused, "wrong-state", "error: a: ", "it is stopped") and refused.count("\n") == 1
