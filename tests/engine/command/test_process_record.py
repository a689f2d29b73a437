"""Processes that nothing but their parents identifies, after the supervisor and the keeper of their command."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.command.cgroup import own_cgroup, run_of_cgroup
from engine.command.membership import MARKER, find_members
from engine.command.process_record import (
    ProcessRecorder,
    RecordedProcess,
    RecordedProcesses,
    left_processes,
    recorded_processes,
)
from engine.command.process_tree import CommandProcess
from engine.command.spec import Command, write_command
from engine.command.user_key import KEY_FILE
from engine.launch.survivors import find_survivors, stop_survivors
from engine.runs.folder import RunFolder
from engine.utils.codec import read_record, write_record
from engine.utils.process import boot_id
from engine.utils.process_table import ProcessId, read_stat
from support.commands import DAEMON, names_of, started
from support.gputrain_command import wait_for
from support.replace import replace
from support.runs.factories import make_command_run


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found, _ = make_command_run(tmp_path, "a")
    write_command(found, Command(argv=("sh",), cwd="/", cwd_inode=1))
    return found


@pytest.fixture
def process(folder: RunFolder, tmp_path: Path) -> Iterator[CommandProcess]:
    """A command with a daemon that has no environment, on a host where this user can make no cgroup."""
    with started(["sh", "-c", f"{DAEMON} sleep 61; :"], tmp_path, marker=run_id_of(folder)) as found:
        # What is moved before it forks would leave its children in the cgroup.
        wait_for(lambda: sorted(names_of(found.members())) == ["sh", "sleep", "sleep"], "the daemon")
        for member in found.members():
            if run_of_cgroup(member.pid) is not None:
                Path(f"{own_cgroup()}/cgroup.procs").write_text(str(member.pid))
        found._cgroup = None
        # Until it has replaced its image, a process has the environment of the one that forked it.
        wait_for(lambda: names_of(found.unmarked_members()) == ["sleep"], "the environment of the daemon")
        yield found


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
    assert daemon in process.members() and daemon not in find_members(run_id_of(folder))
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
    recorded = read_record(folder.processes, RecordedProcesses)
    write_record(folder.processes, replace(recorded, **{field: "other"}).signed())
    assert recorded_processes(folder, run_id_of(folder)) == []
    assert daemon not in find_survivors([folder]).get(folder, [])
    daemon.send_signal(signal.SIGKILL)


def test_file_is_deleted_if_nothing_is_left(folder: RunFolder, process: CommandProcess) -> None:
    recorder = ProcessRecorder(folder.processes, process)
    recorder.poll()
    assert folder.processes.exists()
    recorder.close(process.close())
    assert not folder.processes.exists()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user with the marker that a supervisor inside another run has."""
    with subprocess.Popen(["sleep", "61"], env={**os.environ, MARKER: "0" * 32}) as process:
        wait_for(lambda: process.pid in [pid for pid, _ in find_members("0" * 32)], "the marker")
        yield process
        process.kill()


def names_victim(folder: RunFolder, victim: subprocess.Popen[bytes], *, start_ticks: int = 0) -> RecordedProcesses:
    found = ProcessId.find(victim.pid)
    assert found is not None
    processes = [RecordedProcess(pid=found.pid, start_ticks=found.start_ticks)]
    return RecordedProcesses(boot_id=boot_id(), run_id=run_id_of(folder), start_ticks=start_ticks, processes=processes)


def test_processes_that_this_user_has_not_recorded_are_not_named(
    folder: RunFolder, victim: subprocess.Popen[bytes], state: Path
) -> None:
    planted = names_victim(folder, victim)
    signed = planted.signed()
    write_record(folder.processes, signed)
    # The control: the same record with the key of this user.
    assert [pid for pid, _ in find_survivors([folder])[folder]] == [victim.pid]
    for record in (planted, replace(planted, digest="0" * 64), replace(signed, run_id="other"), signed):
        if record is signed:
            (state / "gputrain" / KEY_FILE).unlink()
        write_record(folder.processes, record)
        assert recorded_processes(folder, record.run_id) == []
        assert find_survivors([folder]) == {} and stop_survivors(folder) == (0, [])
    assert victim.poll() is None


def test_process_that_is_older_than_its_command_is_not_named(
    folder: RunFolder, victim: subprocess.Popen[bytes]
) -> None:
    found = ProcessId.find(victim.pid)
    assert found is not None
    for start_ticks, named in ((found.start_ticks, [found]), (found.start_ticks + 1, [])):
        write_record(folder.processes, names_victim(folder, victim, start_ticks=start_ticks).signed())
        assert recorded_processes(folder, run_id_of(folder)) == named


@pytest.mark.parametrize("run_id", ["", "0" * 32])
def test_no_run_has_the_processes_without_a_marker(
    folder: RunFolder, victim: subprocess.Popen[bytes], run_id: str
) -> None:
    assert left_processes(folder, run_id) == []


def test_end_of_a_command_searches_again_what_only_its_keeper_identifies(
    folder: RunFolder, process: CommandProcess
) -> None:
    daemon, process._unmarked = process._unmarked, []
    process.close()
    assert process._unmarked == daemon != []
