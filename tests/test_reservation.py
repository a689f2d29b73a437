"""Runs of one host never take the same GPU: what one holds is not free for another, who waits takes in turn, and what a
dead one held is free again."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Gputrain
from gpu_host import PHANTOM, GpuHost, gpu, gpus_in, uuid_of

# Takes GPUs as a run does, says which, and keeps them until its standard input closes.
HOLDER = """
import json, sys
from engine.gpus.allocation import allocate_devices
from engine.gpus.reservation import ReservedRank
from engine.utils.errors import UsageError
selection, run, wait, ranks = json.loads(sys.argv[1])
tell = lambda **values: print(json.dumps(values), flush=True)
try:
    choice = allocate_devices(selection, run, wait=wait, on_wait=lambda reason: tell(waits=reason))
except UsageError as error:
    tell(refused=str(error))
else:
    choice.reservation.publish_ranks([ReservedRank(run, *rank) for rank in ranks])
    tell(took=[device.index for device in choice.devices], warnings=choice.warnings)
    sys.stdin.read()
    choice.reservation.release()
"""


class Holder:
    """A process that wants GPUs."""

    def __init__(self, gputrain: Gputrain, host: GpuHost, selection: str, run: str = "run", **options: Any) -> None:
        wanted = json.dumps([selection, run, options.get("wait", False), options.get("ranks", [])])
        environment = gputrain.environment | host.environment
        environment["CUDA_VISIBLE_DEVICES"] = options.get("visible", "0,1,2,3")
        self.process = gputrain.start(sys.executable, "-c", HOLDER, wanted, env=environment, stdin=subprocess.PIPE)

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def takes(self) -> list[int]:
        """What it has in the end, after any wait."""
        while "took" not in (said := self.says()):
            assert "waits" in said, said
        took: list[int] = said["took"]
        return took

    def lets_go(self) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@pytest.fixture
def four(host: GpuHost) -> GpuHost:
    host.becomes([gpu(index, used=100 - index) for index in range(4)])
    return host


def left_in(host: GpuHost) -> list[Path]:
    return list((host.folder / "reservations").iterdir())


def test_runs_that_start_at_once_take_no_gpu_twice(gputrain: Gputrain, four: GpuHost) -> None:
    holders = [Holder(gputrain, four, "free:2", f"run-{number}") for number in range(3)]
    said = [holder.says() for holder in holders]
    taken = [index for one in said for index in one.get("took", [])]
    assert sorted(taken) == [0, 1, 2, 3]
    [refused] = [one["refused"] for one in said if "refused" in one]
    assert "2 free GPUs wanted, 0 there: GPU " in refused
    assert "has it; GPU " in refused
    assert refused.endswith("--wait waits for them")
    for holder in holders:
        holder.lets_go()
    assert left_in(four) == []


def test_what_a_killed_run_held_is_free_again(gputrain: Gputrain, four: GpuHost) -> None:
    killed = Holder(gputrain, four, "all")
    assert killed.takes() == [0, 1, 2, 3]
    killed.process.kill()
    killed.process.wait()
    after = Holder(gputrain, four, "free:4")
    assert after.takes() == [0, 1, 2, 3]
    after.lets_go()
    assert left_in(four) == []


def test_who_waits_is_told_for_what_and_takes_in_turn(gputrain: Gputrain, four: GpuHost) -> None:
    first, second = Holder(gputrain, four, "0,1,2", "first"), Holder(gputrain, four, "free:1", "second")
    assert (first.takes(), second.takes()) == ([0, 1, 2], [3])
    big = Holder(gputrain, four, "free:2", "big", wait=True)
    assert "2 free GPUs wanted, 0 there: GPU 0, 1, 2: first of " in big.says()["waits"]
    small = Holder(gputrain, four, "free:1", "small", wait=True)
    assert "waits" in small.says()
    second.lets_go()
    # One is free now, and the one that came first needs two.
    assert "2 free GPUs wanted, 1 there" in big.says()["waits"]
    assert "big of " in small.says()["waits"]
    late = Holder(gputrain, four, "free:1", "late")
    assert "big of " in late.says()["refused"]
    first.lets_go()
    pair, single = big.takes(), small.takes()
    assert (len(pair), len(single)) == (2, 1)
    assert not set(pair) & set(single)
    for holder in (big, small):
        holder.lets_go()
    assert left_in(four) == []


def test_a_driver_that_starts_slowly_is_not_taken_for_none(gputrain: Gputrain, four: GpuHost) -> None:
    four.becomes([gpu(index) for index in range(2)], "fault * nvmlInitWithFlags slow=3000")
    holder = Holder(gputrain, four, "auto")
    assert holder.takes() == [0, 1]


def test_a_driver_that_goes_while_a_run_waits_does_not_end_the_wait(gputrain: Gputrain, four: GpuHost) -> None:
    first = Holder(gputrain, four, "all", "first")
    first.takes()
    waiting = Holder(gputrain, four, "auto", wait=True)
    assert "no GPU is free" in waiting.says()["waits"]
    healthy = [gpu(index) for index in range(4)]
    four.becomes(healthy, "fault * * 1", "fault * nvmlDeviceGetCount_v2 1")
    while (said := waiting.says()["waits"]) != "uninitialized":
        assert "no GPU is free" in said
    four.becomes(healthy)
    first.lets_go()
    assert waiting.takes() == [0, 1, 2, 3]


def test_named_gpus_may_be_shared_with_a_warning_and_waited_for(gputrain: Gputrain, four: GpuHost) -> None:
    first = Holder(gputrain, four, "0", "first")
    assert first.takes() == [0]
    sharing = Holder(gputrain, four, "0")
    said = sharing.says()
    assert said["took"] == [0]
    assert said["warnings"][0].startswith("sharing what is in use: GPU 0: first of ")
    sharing.lets_go()
    waiting = Holder(gputrain, four, "0", wait=True)
    assert waiting.says()["waits"].startswith("not all of these are free: GPU 0: first of ")
    first.lets_go()
    assert waiting.takes() == [0]


def test_an_inherited_variable_narrows_what_is_waited_for(gputrain: Gputrain, four: GpuHost) -> None:
    holder = Holder(gputrain, four, "auto", visible="3")
    assert holder.takes() == [3]
    waiting = Holder(gputrain, four, "auto", wait=True, visible=uuid_of(3))
    assert "no GPU is free: GPU 3: run of " in waiting.says()["waits"]
    elsewhere = Holder(gputrain, four, "free:3")
    assert elsewhere.takes() == [0, 1, 2]


def test_a_folder_that_others_may_write_to_is_not_used(gputrain: Gputrain, four: GpuHost) -> None:
    holder = Holder(gputrain, four, "0")
    holder.takes()
    [folder] = [path for path in left_in(four) if path.is_dir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    holder.lets_go()
    folder.mkdir()
    folder.chmod(0o777)
    assert "is not yours alone to write to" in Holder(gputrain, four, "0").says()["refused"]


def test_a_run_that_waits_ends_when_asked_and_leaves_nothing(gputrain: Gputrain, four: GpuHost) -> None:
    holder = Holder(gputrain, four, "all")
    holder.takes()
    environment = gputrain.environment | four.environment | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    run = gputrain.start("run", "--headless", "digits", "--gpus", "free:1", "--wait", env=environment)
    assert run.stderr is not None
    assert run.stderr.readline().startswith("waiting: 1 free GPU wanted, 0 there: GPU 0, 1, 2, 3: run of ")
    run.send_signal(signal.SIGTERM)
    assert run.wait(20) == 1
    assert "Traceback" not in run.stderr.read()
    assert not gputrain.runs.exists()
    holder.lets_go()
    assert left_in(four) == []


def test_ranks_of_our_own_are_known_by_what_they_report(gputrain: Gputrain, four: GpuHost) -> None:
    this = os.getpid()
    four.becomes(
        [gpu(index) for index in range(4)],
        f"process 0 {this} 700 compute",
        f"process 1 {PHANTOM} 800 compute",
    )
    ranks = [[number, this, uuid_of(number)] for number in range(3)]
    holder = Holder(gputrain, four, "0,1,2", "mine", ranks=ranks)
    holder.takes()
    seen = gpus_in(gputrain("gpus", "--json", **four.environment).stdout)
    assert [gpu["runs"] for gpu in seen] == [["mine"]] * 3 + [[]]
    [found], [phantom], [unlisted] = (gpu["processes"]["value"] for gpu in seen[:3])
    # As the driver lists it; as the host's pid that nobody here knows; and where the driver lists nothing.
    assert (found["pid"], found["run"], found["rank"]) == (this, "mine", 0)
    assert (phantom["pid"], phantom["run"], phantom["rank"]) == (PHANTOM, "mine", 1)
    assert phantom["gpu_memory"]["value"] == 800 << 20
    assert phantom["command"]["value"] == found["command"]["value"]
    assert (unlisted["pid"], unlisted["run"], unlisted["rank"]) == (this, "mine", 2)
    assert unlisted["gpu_memory"]["reason"] == "the driver does not list this process"
    assert seen[3]["processes"]["value"] == []
    table = gputrain("gpus", "--processes", **four.environment).stdout
    assert "mine rank 1: " in table
