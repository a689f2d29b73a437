"""Orphans: what is left of a run without a supervisor and of a torchrun that was killed, and nothing else."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.command import devices
from engine.command.membership import MARKER
from engine.command.metric_files import METRICS_VARIABLE
from engine.command.orphans import Origin, OrphanFinder, leftover_finder
from engine.command.spec import Command, write_command
from engine.command.stop import end_processes
from engine.gpus.snapshot import GpuProcess
from engine.runs.ownership import Ownership
from engine.utils.process_table import ProcessId, read_stat
from support.commands import supervised_members, supervisor_command, wait_for_end
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, sample_gpus
from support.gputrain_command import wait_for
from support.runs.factories import make_command_run
from support.runs.torchrun_orphans import WORKER, adopting_orphans, kill_agent, start_agent

ORIGIN = Origin(torchrun=(b"none", b"localhost", b"29500"))


@pytest.fixture
def init_process() -> Iterator[None]:
    with adopting_orphans("tini"):
        yield


def test_workers_of_torchrun_that_was_killed_are_orphans_with_their_children(init_process: None) -> None:
    with start_agent(**WORKER) as (agent, worker):
        assert ORIGIN not in OrphanFinder().search()
        kill_agent(agent, worker)
        [found] = [each for each in OrphanFinder().list() if each.origin == ORIGIN]
        assert [process.depth for process in found.processes] == [0, 1]
        assert found.processes[0].id.pid == worker


@pytest.mark.parametrize("missing", ["TORCHELASTIC_RUN_ID", "LOCAL_RANK"])
def test_process_with_other_variables_is_only_detached(init_process: None, missing: str) -> None:
    with start_agent(**{name: value for name, value in WORKER.items() if name != missing}) as (agent, worker):
        kill_agent(agent, worker)
        assert not any(ProcessId.find(worker) in found for found in OrphanFinder().search().values())


def test_daemon_of_worker_is_no_orphan_while_its_torchrun_lives(init_process: None) -> None:
    with start_agent(**WORKER), start_agent(**WORKER) as (second, daemon):
        kill_agent(second, daemon)
        assert ORIGIN not in OrphanFinder().search()


def test_worker_is_orphan_of_killed_torchrun_beside_a_later_one_with_the_same_port(init_process: None) -> None:
    with start_agent(**WORKER) as (first, worker):
        kill_agent(first, worker)
        started = read_stat(worker)
        assert started is not None
        # The start of a process has a resolution of 10 ms.
        wait_for(lambda: _is_later(started.start_ticks), "another clock tick")
        with start_agent(**WORKER) as (_, other):
            found = [process.pid for process in OrphanFinder().search()[ORIGIN]]
            assert worker in found and other not in found


def _is_later(ticks: int) -> bool:
    with subprocess.Popen(["sleep", "60"]) as process:
        status = read_stat(process.pid)
        process.kill()
    return status is not None and status.start_ticks > ticks


def test_parent_that_may_be_an_agent_makes_no_orphan() -> None:
    # As torchrun is, if it is PID 1 of a container.
    with adopting_orphans("torchrun"), start_agent(**WORKER) as (agent, worker):
        kill_agent(agent, worker)
        assert ORIGIN not in OrphanFinder().search()


def test_process_of_run_is_orphan_once_nobody_owns_the_run(tmp_path: Path) -> None:
    folder, run_id = make_command_run(tmp_path, "a")
    write_command(folder, Command(argv=("sleep",), cwd="/", cwd_inode=1))
    ownership = Ownership(folder)
    metrics = {"GPUTRAIN_RUN_ID": run_id, "GPUTRAIN_METRICS": f"{folder.path}/metrics/own.jsonl"}
    with subprocess.Popen(["sleep", "600"], env=os.environ | metrics) as process:
        origin = Origin(run_id, str(folder.path))
        wait_for(lambda: b"sleep" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), "the program")
        assert origin not in OrphanFinder().search()
        ownership.release()
        assert [each.pid for each in OrphanFinder().search()[origin]] == [process.pid]
        assert origin.label == "a"
        assert Origin("a-2", str(folder.path)) not in OrphanFinder().search()
        process.kill()


@pytest.mark.parametrize("in_host", [True, False], ids=["host", "container"])
def test_snapshot_names_orphans_and_detached_processes_if_the_driver_lists_ids_of_this_namespace(
    init_process: None, loaded_gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch, in_host: bool
) -> None:
    monkeypatch.setattr(devices, "is_host_namespace", lambda: in_host)
    with start_agent(**WORKER) as (agent, worker), start_agent(A="b") as (starter, plain):
        lines = [f"process 0 {pid} 61000 compute" for pid in (worker, plain, os.getpid())]
        loaded_gpu_host.set_scene(gpu_line(0), lines)
        assert _marks() == [("", False)] * 3
        kill_agent(agent, worker)
        kill_agent(starter, plain)
        assert _marks()[:2] == ([("torchrun", True), ("", True)] if in_host else [("", False)] * 2)


def _marks() -> list[tuple[str, bool]]:
    processes: tuple[GpuProcess, ...] = OrphanFinder().mark(sample_gpus()).gpus[0].processes.value or ()
    return [(process.orphan_of, process.detached) for process in processes]


def test_orphans_are_ended_also_if_they_ignore_sigterm(init_process: None) -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    agent_script = (
        f"env {' '.join(f'{name}={value}' for name, value in WORKER.items())} {sys.executable} -c '{script}' & wait"
    )
    with subprocess.Popen(["sh", "-c", agent_script], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        agent.stdout.readline()
        agent.kill()
        agent.wait()
        wait_for(lambda: ORIGIN in OrphanFinder().search(), "the orphan")
        [orphan] = OrphanFinder().search()[ORIGIN]
        assert end_processes(leftover_finder(ORIGIN), grace_s=0.1) == []
        assert not orphan.is_running()
        os.waitpid(orphan.pid, 0)


def test_live_run_below_an_orphan_is_not_ended_with_it(tmp_path: Path) -> None:
    folder, run_id = make_command_run(tmp_path, "a")
    write_command(folder, Command(argv=("sh",), cwd="/", cwd_inode=1))
    variables = os.environ | {MARKER: run_id, METRICS_VARIABLE: f"{folder.path}/metrics/own.jsonl"}
    inner = tmp_path / "inner"
    inner.mkdir()
    # What a command starts when it calls `gputrain run`.
    script = f"{shlex.join(supervisor_command(inner, 'sleep 61'))} & wait"
    with subprocess.Popen(["sh", "-c", script], env=variables) as orphan:
        inner_members = supervised_members(inner)
        [found] = [pids for origin, pids in OrphanFinder().search().items() if origin.run_id == run_id]
        assert [process.pid for process in found] == [orphan.pid]
        assert end_processes(leftover_finder(Origin(run_id, str(folder.path))), grace_s=0.1) == []
        assert orphan.wait() != 0
        assert all(process.is_running() for process in inner_members)
        os.kill(_parent(_parent(inner_members[0].pid)), signal.SIGKILL)
    wait_for_end(inner_members)


def _parent(pid: int) -> int:
    status = read_stat(pid)
    assert status is not None
    return status.parent
