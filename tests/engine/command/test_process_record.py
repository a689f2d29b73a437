"""Processes that nothing but their parents identifies, after the supervisor and the keeper of their command."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine.command.cgroup import own_cgroup, run_of_cgroup
from engine.command.process_record import ProcessRecorder, RecordedProcesses, recorded_processes
from engine.command.process_tree import CommandProcess, find_left
from engine.command.spec import Command, write_command
from engine.launch.survivors import find_survivors, stop_survivors
from engine.runs.folder import RunFolder
from engine.utils.codec import read_record, write_record
from engine.utils.process_table import ProcessId, read_stat
from support.commands import DAEMON, started
from support.gputrain_command import wait_for
from support.replace import replace
from support.runs.event_factories import make_command_started
from support.runs.factories import make_run_folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = make_run_folder(tmp_path, "a", make_command_started(run_id=uuid.uuid4().hex))
    write_command(found, Command(argv=("sh",), cwd="/", cwd_inode=1))
    return found


@pytest.fixture
def process(folder: RunFolder, tmp_path: Path) -> Iterator[CommandProcess]:
    """A command with a daemon that has no environment, on a host where this user can make no cgroup."""
    with started(["sh", "-c", f"{DAEMON} sleep 61; :"], tmp_path, marker=run_id_of(folder)) as found:
        wait_for(lambda: len(found.members()) == 3, "the daemon")
        for member in found.members():
            if run_of_cgroup(member.pid) is not None:
                Path(f"{own_cgroup()}/cgroup.procs").write_text(str(member.pid))
        found._cgroup = None
        # Until it has replaced its image, a process has the environment of the one that forked it.
        wait_for(lambda: names_of(found.unmarked_members()) == ["sleep"], "the environment of the daemon")
        yield found


def names_of(processes: Sequence[ProcessId]) -> list[str]:
    found = (read_stat(process.pid) for process in processes)
    return [status.name for status in found if status is not None]


def run_id_of(folder: RunFolder) -> str:
    command = folder.history().command
    assert command is not None
    return command.run_id


def record(folder: RunFolder, process: CommandProcess) -> ProcessId:
    """Record the daemon, kill the keeper, and with it the command, and return what is left."""
    ProcessRecorder(folder.processes, process).poll()
    [daemon] = recorded_processes(folder, run_id_of(folder))
    command = read_stat(process.pid)
    assert daemon.is_running() and daemon.pid != process.pid and command is not None
    os.kill(command.parent, signal.SIGKILL)
    process.wait(30)
    return daemon


def test_supervisor_ends_what_is_left_if_its_keeper_is_killed(folder: RunFolder, process: CommandProcess) -> None:
    daemon = record(folder, process)
    assert daemon in process.members() and daemon not in find_left(run_id_of(folder))
    process.end_all(signal.SIGKILL)
    wait_for(lambda: not daemon.is_running(), "the end of the daemon")


def test_what_is_left_of_supervisor_and_keeper_is_named_and_ended(folder: RunFolder, process: CommandProcess) -> None:
    daemon = record(folder, process)
    assert daemon in find_survivors([folder])[folder]
    count, unkillable = stop_survivors(folder)
    assert count >= 1 and unkillable == [] and not daemon.is_running()
    assert find_survivors([folder]) == {}


@pytest.mark.parametrize("field", ["boot_id", "run_id"])
def test_processes_of_another_boot_and_of_another_start_are_not_those_of_the_run(
    folder: RunFolder, process: CommandProcess, field: str
) -> None:
    daemon = record(folder, process)
    write_record(folder.processes, replace(read_record(folder.processes, RecordedProcesses), **{field: "other"}))
    assert recorded_processes(folder, run_id_of(folder)) == []
    assert daemon not in find_survivors([folder]).get(folder, [])
    daemon.send_signal(signal.SIGKILL)


def test_file_is_deleted_if_nothing_is_left(folder: RunFolder, process: CommandProcess) -> None:
    recorder = ProcessRecorder(folder.processes, process)
    recorder.poll()
    assert folder.processes.exists()
    recorder.close(process.close())
    assert not folder.processes.exists()
