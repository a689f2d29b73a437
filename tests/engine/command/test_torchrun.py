"""torchrun as a command: it starts each rank in a session of its own, and gives them 30 s to stop."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from engine.command.process_tree import CommandProcess
from engine.command.stop import Step, StopSequence
from engine.utils.process_table import read_stat
from support.commands import output_of, started, wait_for_end
from support.gputrain_command import wait_for

pytestmark = pytest.mark.nightly

RANK = """
import signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved", flush=True)
"""


def torchrun(folder: Path, *arguments: str) -> list[str]:
    (folder / "train.py").write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    return [*launcher, "train.py", *arguments]


def wait_for_ranks(process: CommandProcess, folder: Path) -> None:
    wait_for(lambda: output_of(folder).count("ready") == 2, "both ranks", 120)
    groups = {status.group for pid, _ in process.members() if (status := read_stat(pid)) is not None}
    assert len(groups) == 3


def test_stop_gives_ranks_time_to_save(tmp_path: Path) -> None:
    with started(torchrun(tmp_path), tmp_path) as process:
        wait_for_ranks(process, tmp_path)
        stop = StopSequence(process)
        stop.request()
        wait_for(stop.poll, "the end of torchrun")
        assert (stop.step, stop.left_behind) == (Step.STOP, ())
    assert output_of(tmp_path).count("saved") == 2


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    with started(torchrun(tmp_path, "stubborn"), tmp_path) as process:
        wait_for_ranks(process, tmp_path)
        members = process.members()
        stop = StopSequence(process, leftover_grace_s=0.5)
        assert next(member for member in members if member.pid == process.pid).send_signal(signal.SIGKILL)
        wait_for(stop.poll, "the end of the ranks")
        assert (process.poll(), len(stop.left_behind)) == (-signal.SIGKILL, 2)
        wait_for_end(members)
