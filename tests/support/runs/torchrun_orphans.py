"""Real processes that stand for a torchrun agent and its worker, and a test process that adopts the worker."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.utils.process_table import read_stat
from support.gputrain_command import wait_for

PR_SET_CHILD_SUBREAPER = 36
WORKER = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


@contextmanager
def adopting_orphans(name: str) -> Iterator[None]:
    """Make this process adopt orphans, under the name of an init process or another one."""
    libc, own_name = ctypes.CDLL(None), Path(f"/proc/{os.getpid()}/comm").read_bytes().strip()
    main = os.getpid()
    comm = Path(f"/proc/{main}/task/{main}/comm")
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    comm.write_text(name)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        comm.write_bytes(own_name)


@contextmanager
def start_agent(**worker: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a program that starts a worker with these variables and waits for it; yield it with the ID of the worker.

    The worker has a child without its environment."""
    variables = " ".join(f"{name}={value}" for name, value in worker.items())
    script = f"env {variables} sh -c 'env -i sleep 600 & echo $!; wait' & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(agent.stdout.readline()), int(agent.stdout.readline())]
        worker_pid = next(pid for pid in pids if (status := read_stat(pid)) and status.parent == agent.pid)
        try:
            yield agent, worker_pid
        finally:
            agent.kill()
            for pid in pids:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def kill_agent(agent: subprocess.Popen[str], worker: int) -> None:
    """Kill an agent, and wait until this process has adopted its worker."""
    agent.kill()
    agent.wait()
    wait_for(lambda: (status := read_stat(worker)) is not None and status.parent == os.getpid(), "the adoption")
