"""Reservations of GPUs between processes: exclusive, served in queue order, and released when a process dies."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.base.codec import convert
from engine.base.errors import Problem
from support.gpu.fake_gpu_host import UNKNOWN_PID, FakeGpuHost, gpu_line, gpu_uuid, parse_gpus_json
from support.gputrain_command import Gputrain
from support.messages import has_problem, says

# Reserves GPUs as a run does, prints them as JSON, and holds them until its standard input closes.
HOLDER = """
import json, sys
from engine.base.codec import encode
from engine.gpus.allocation import allocate_devices
from engine.gpus.reservation_entry import ReservedRank
from engine.base.errors import UsageError
selection, run, wait, ranks, setup = json.loads(sys.argv[1])
exec(setup)
emit = lambda **values: print(encode(values).decode(), flush=True)
try:
    choice = allocate_devices(selection, run, wait=wait, on_wait=lambda reason: emit(waits=reason))
except UsageError as error:
    emit(refused=error.problems)
else:
    choice.reservation.publish_ranks([ReservedRank(run, *rank) for rank in ranks])
    emit(took=[device.index for device in choice.devices], warnings=choice.warnings)
    sys.stdin.read()
    choice.reservation.release()
"""


class Holder:
    """A process that requests GPUs."""

    def __init__(self, gputrain: Gputrain, host: FakeGpuHost, selection: str, run: str = "run", **options: Any) -> None:
        values = [selection, run, options.get("wait", False), options.get("ranks", []), options.get("setup", "")]
        arguments = json.dumps(values)
        environment = gputrain.environment | host.environment
        environment["CUDA_VISIBLE_DEVICES"] = options.get("visible", "0,1,2,3")
        self.process = gputrain.start(sys.executable, "-c", HOLDER, arguments, env=environment, stdin=subprocess.PIPE)

    def read_message(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def read_answer(self) -> dict[str, Any]:
        """Return the message after any wait: also without one, a run waits for another that has reserved the same."""
        while "waits" in (message := self.read_message()):
            pass
        return message

    def read_until_taken(self) -> dict[str, Any]:
        """Return the message with the reserved GPUs, after any wait."""
        message = self.read_answer()
        assert "took" in message, message
        return message

    def read_until_waits_because(self, *values: str) -> None:
        """Read messages until one has a reason with these values: each change of any GPU is a message."""
        while not says(self.read_message()["waits"], "gpu-in-use", *values):
            pass

    def wait_for_gpus(self) -> list[int]:
        """Return the indices of the reserved GPUs, after any wait."""
        indices: list[int] = self.read_until_taken()["took"]
        return indices

    def release(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


# Reserves what was free before other processes reserve the same.
SELECT_AT_THE_SAME_TIME = """
from engine.gpus import allocation
from engine.base import files
files.LOCK_WAIT_SECONDS = 0.1
original_select, calls = allocation.select, []
def select(*arguments, **options):
    chosen = original_select(*arguments, **options)
    if not calls:
        calls.append(1)
        emit(selected=len(chosen))
        sys.stdin.readline()
    return chosen
allocation.select = select
"""


@pytest.fixture
def four_gpus(gpu_host: FakeGpuHost) -> FakeGpuHost:
    gpu_host.set_scene([gpu_line(index, used=100 - index) for index in range(4)])
    return gpu_host


def reservation_files(host: FakeGpuHost) -> list[Path]:
    return list((host.folder / "reservations").iterdir())


def test_reservation_of_killed_run_is_released(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    killed = Holder(gputrain, four_gpus, "all")
    assert killed.wait_for_gpus() == [0, 1, 2, 3]
    killed.process.kill()
    killed.process.wait()
    after = Holder(gputrain, four_gpus, "free:4")
    assert after.wait_for_gpus() == [0, 1, 2, 3]
    after.release()
    assert reservation_files(four_gpus) == []


@pytest.mark.nightly
def test_reservation_wait_survives_driver_loss(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    first = Holder(gputrain, four_gpus, "all", "first")
    first.wait_for_gpus()
    waiting = Holder(gputrain, four_gpus, "auto", wait=True)
    assert says(waiting.read_message()["waits"], "gpu-in-use", "first")
    healthy = [gpu_line(index) for index in range(4)]
    four_gpus.set_scene(healthy, "fault * * 1", "fault * nvmlDeviceGetCount_v2 1")
    while "uninitialized" not in (reason := waiting.read_message()["waits"]):
        assert says(reason, "gpu-in-use", "first")
    four_gpus.set_scene(healthy)
    first.release()
    assert waiting.wait_for_gpus() == [0, 1, 2, 3]


@pytest.mark.parametrize("is_listed", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_waiting_run_survives_the_loss_of_a_gpu(gputrain: Gputrain, four_gpus: FakeGpuHost, is_listed: bool) -> None:
    first = Holder(gputrain, four_gpus, "1", "first")
    first.wait_for_gpus()
    waiting = Holder(gputrain, four_gpus, "3,1", wait=True)
    waiting.read_until_waits_because("GPU 1: reserved by run first")
    healthy = [gpu_line(index) for index in range(4)]
    four_gpus.set_scene(*([healthy, "fault 3 * 15"] if is_listed else [healthy[:3]]))
    waiting.read_until_waits_because("GPU 3: ", "GPU 1: reserved by run first", "later runs may start first")
    four_gpus.set_scene(healthy)
    first.release()
    assert waiting.wait_for_gpus() == [3, 1]


def test_run_that_waits_also_waits_for_the_driver(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    healthy = [gpu_line(index) for index in range(4)]
    four_gpus.set_scene(healthy, "fault * * 1", "fault * nvmlDeviceGetCount_v2 1")
    waiting = Holder(gputrain, four_gpus, "free:4", wait=True)
    assert "the NVIDIA driver is not available (uninitialized)" in waiting.read_message()["waits"]
    four_gpus.set_scene(healthy)
    assert waiting.wait_for_gpus() == [0, 1, 2, 3]


def test_reservation_shares_named_gpus_with_warning_or_waits(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    first = Holder(gputrain, four_gpus, "0", "first")
    assert first.wait_for_gpus() == [0]
    sharing = Holder(gputrain, four_gpus, "0")
    message = sharing.read_message()
    assert message["took"] == [0]
    warnings = convert(message["warnings"], list[Problem])
    assert has_problem(warnings, "gpu-in-use", "", "GPU 0: reserved by run first (user ")
    sharing.release()
    waiting = Holder(gputrain, four_gpus, "0", wait=True)
    assert says(waiting.read_message()["waits"], "gpu-in-use", "GPU 0: reserved by run first (user ")
    first.release()
    assert waiting.wait_for_gpus() == [0]


def test_reservation_closes_world_writable_folder(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    folder = Path(four_gpus.environment["GPUTRAIN_RESERVATIONS"]) / f"gputrain-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    holder = Holder(gputrain, four_gpus, "0")
    assert holder.wait_for_gpus() == [0]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    holder.release()


def test_runs_that_select_at_the_same_time_get_different_gpus(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    racers = [Holder(gputrain, four_gpus, "free:2", name, setup=SELECT_AT_THE_SAME_TIME) for name in ("a", "b")]
    assert [racer.read_message() for racer in racers] == [{"selected": 2}] * 2
    for racer in racers:
        assert racer.process.stdin is not None
        racer.process.stdin.write("\n")
        racer.process.stdin.flush()
    messages = [racer.read_until_taken() for racer in racers]
    assert sorted(index for message in messages for index in message["took"]) == [0, 1, 2, 3]
    for racer in racers:
        racer.release()


def test_gpus_command_attributes_processes_to_reserved_ranks(gputrain: Gputrain, four_gpus: FakeGpuHost) -> None:
    pid = os.getpid()
    four_gpus.set_scene(
        [gpu_line(index) for index in range(4)],
        f"process 0 {pid} 700 compute",
        f"process 1 {UNKNOWN_PID} 800 compute",
    )
    ranks = [[number, pid, gpu_uuid(number)] for number in range(3)]
    holder = Holder(gputrain, four_gpus, "0,1,2", "mine", ranks=ranks)
    holder.wait_for_gpus()
    gpus = parse_gpus_json(gputrain("gpus", "--json", **four_gpus.environment).stdout)
    assert [gpu["runs"] for gpu in gpus] == [["mine"]] * 3 + [[]]
    [listed], [unknown_pid], [unlisted] = (gpu["processes"]["value"] for gpu in gpus[:3])
    # The PID is listed by NVML, listed as an unknown PID of the host's namespace, and not listed at all.
    assert (listed["pid"], listed["run"], listed["rank"]) == (pid, "mine", 0)
    assert (unknown_pid["pid"], unknown_pid["run"], unknown_pid["rank"]) == (UNKNOWN_PID, "mine", 1)
    assert unknown_pid["gpu_memory"]["value"] == 800 << 20
    assert unknown_pid["command"]["value"] == listed["command"]["value"]
    assert (unlisted["pid"], unlisted["run"], unlisted["rank"]) == (pid, "mine", 2)
    assert unlisted["gpu_memory"]["reason"] == "the driver does not list this process"
    assert gpus[3]["processes"]["value"] == []
    table = gputrain("gpus", "--processes", **four_gpus.environment).stdout
    assert "mine rank 1: " in table
