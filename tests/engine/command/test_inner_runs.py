"""A run that the command of another run starts: neither ends the processes of the other."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.command.process_tree import CommandProcess
from engine.utils.process_table import ProcessId, read_stat
from support.commands import DAEMON, started, supervised_members, supervisor_command, wait_for_end
from support.gputrain_command import wait_for


class Runs(NamedTuple):
    """The command of an outer run, and an inner run with its supervisor and the processes of its command."""

    outer: CommandProcess
    inner_supervisor: ProcessId
    inner_members: list[ProcessId]

    def is_inner_running(self) -> bool:
        return all(process.is_running() for process in (self.inner_supervisor, *self.inner_members))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    for name in ("outer", "inner"):
        (tmp_path / name).mkdir()
    inner = shlex.join(supervisor_command(tmp_path / "inner", f"trap '' INT; {DAEMON} setsid sleep 61 & sleep 61"))
    # In the process group of the outer command.
    script = f"{inner} & echo $! > inner-pid; {DAEMON} sleep 61; :"
    with started(["sh", "-c", script], tmp_path / "outer") as outer:
        members = supervised_members(tmp_path / "inner")
        supervisor = ProcessId.find(int((tmp_path / "outer/inner-pid").read_text()))
        assert supervisor is not None
        yield Runs(outer, supervisor, members)
        supervisor.send_signal(signal.SIGKILL)
        wait_for_end(members)


def test_stop_signal_to_outer_command_does_not_reach_inner_supervisor_in_its_group(runs: Runs) -> None:
    status = read_stat(runs.inner_supervisor.pid)
    assert status is not None and status.group == runs.outer.pid
    runs.outer.signal_group(signal.SIGTERM)
    assert runs.outer.wait(30) == -signal.SIGTERM
    assert runs.is_inner_running()


def test_kill_of_outer_command_leaves_inner_run(runs: Runs) -> None:
    members = runs.outer.members()
    runs.outer.end_all(signal.SIGKILL)
    wait_for_end(members)
    runs.outer.close()
    assert runs.is_inner_running()


def test_inner_command_ends_with_its_supervisor_alone(runs: Runs) -> None:
    runs.inner_supervisor.send_signal(signal.SIGKILL)
    wait_for_end(runs.inner_members)
    assert runs.outer.poll() is None
    # While the inner keeper exits, it has no environment.
    wait_for(lambda: len(runs.outer.members()) == 3, "the processes of the outer run")
