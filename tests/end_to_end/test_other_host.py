"""A command on another host, from its start to its resume, with `gputrain` there and a stand-in for ssh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.gputrain_command import Gputrain, isolated_gputrain, wait_for
from support.servers.ssh_stand_in import SshStandIn

# It waits to be stopped, and ends at once when it is resumed.
PROGRAM = """\
import pathlib, time
print('step 1 loss 0.5', flush=True)
if not pathlib.Path('resumed').exists():
    pathlib.Path('resumed').touch()
    time.sleep(100)
"""


@pytest.fixture
def gputrain(ssh: SshStandIn, tmp_path: Path) -> Iterator[Gputrain]:
    ssh.set_host("lab1", "echo Welcome; echo quota >&2")
    yield from isolated_gputrain(tmp_path / "work")


def test_command_on_host_is_started_stopped_and_resumed(gputrain: Gputrain) -> None:
    (gputrain.folder / "train.py").write_text(PROGRAM)
    started = gputrain("run", "--on", "any:lab1", "--gpus", "cpu", "--", "python", "train.py")
    assert (started.returncode, started.stdout) == (0, "lab1:train-1\n"), started.stderr
    wait_for((gputrain.folder / "resumed").exists, "the command")
    follower = gputrain.start("wait", "train-1")
    assert follower.stdout is not None
    # As sshd does when the connection has ended.
    follower.stdout.close()
    follower.wait(20)
    stopped = gputrain("stop", "lab1:train-1")
    assert (stopped.returncode, stopped.stderr) == (0, "lab1:train-1 is stopped.\n")
    assert gputrain("resume", "lab1:train-1").stdout == "lab1:train-1\n"
    waited = gputrain("wait", "lab1:train-1")
    assert (waited.returncode, waited.stdout) == (0, "lab1:train-1 finished: loss 0.5\n")
    compared = json.loads(gputrain("compare", "train-1", "lab1:train-1", "--json").stdout)
    here, there = compared["runs"]
    assert (there["name"], there["state"], compared["config"]) == ("lab1:train-1", "finished", {})
    assert here["figures"] == there["figures"] and there["figures"]["metrics.loss"] == 0.5
