"""A process that imports torch once and forks the ranks of a run, and how its supervisor holds it.

The ranks begin with all that they need imported already, and share its memory: a start costs the time of one import of
torch, and not of one for the supervisor and one more for each rank. The process itself never touches a GPU and starts
no thread before it has forked. It dies with the supervisor, and the ranks die with it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from engine.distributed.failures import rank_failure
from engine.distributed.watchdog import Heartbeats
from engine.launch.rank_process import Inherited, run_rank
from engine.runs.events import RankFailed
from engine.training.job import Job
from engine.utils.process import STOP_SIGNALS, die_with_parent, redirect_output

PROGRAM = "from engine.launch.forkserver import main; main()"
# NumPy's library would start threads when it is imported. Torch's threads wait for each other in a loop: where another
# process has one of the cores they would wait so for its whole time slice, and train at a fifth of the speed.
THREAD_ENV = {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "5000"}
# So long it may take to end once it was killed: a process that waits for a dead disk or driver never does.
KILL_TIMEOUT_SECONDS = 3.0
# Between two looks at a rank that is about to end.
EXIT_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class RanksStarted:
    """The ranks are there; a rank's pid lasts as long as the fork server does, which reaps none of them before its
    end."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class RankExited:
    """A negative `exit_code` is a signal's number."""

    rank: int
    exit_code: int


class ForkServer:
    """The supervisor's hold on it, from before it is known what ranks there will be: the import goes on meanwhile."""

    def __init__(self) -> None:
        mine, theirs = Pipe()
        # Blocked for life in the fork server, and in a rank until it has handlers: a signal is often sent to all.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**THREAD_ENV, **os.environ},
            )
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._connection = mine
        self._exit_codes: dict[int, int] = {}
        self._num_ranks = 0
        self.pids: tuple[int, ...] = ()
        """Of the ranks, once they are there."""
        self.failure: RankFailed | None = None
        """Why there will be none."""
        self.died_early = False
        """It ended before the ranks did, and they with it."""

    def fork(self, job: Job, connections: Sequence[Connection], heartbeats: Heartbeats) -> None:
        """Let it fork the ranks, each with its end of a pipe, which is closed here. They get this process's environment
        as it is now."""
        self._num_ranks = job.plan.local_world_size
        with suppress(OSError):
            self._connection.send((job, dict(os.environ)))
            for handle in (heartbeats.fd, *(connection.fileno() for connection in connections)):
                send_handle(self._connection, handle, self._process.pid)
        for connection in connections:
            connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_open(self) -> bool:
        """More news may come."""
        return not self._connection.closed

    def poll(self) -> None:
        """Take what has come in, without a wait for it."""
        try:
            while self.is_open and self._connection.poll():
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            self._connection.close()
            self.died_early = bool(self.alive())
            code = self._wait_exit_code()
            for rank in self.alive():
                self._exit_codes[rank] = code

    def _wait_exit_code(self) -> int:
        try:
            return self._process.wait(KILL_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _handle(self, message: RanksStarted | RankExited | RankFailed) -> None:
        if isinstance(message, RanksStarted):
            self.pids = message.pids
        elif isinstance(message, RankExited):
            self._exit_codes[message.rank] = message.exit_code
        else:
            self.failure = message

    def exit_code(self, rank: int) -> int | None:
        """None while it lives."""
        return self._exit_codes.get(rank)

    def alive(self) -> list[int]:
        """The ranks that have not ended, also those that are yet to begin."""
        return [rank for rank in range(self._num_ranks) if rank not in self._exit_codes]

    def kill(self) -> None:
        """End whatever is left."""
        if not self.is_open:
            return
        for rank in self.alive():
            if self.pids:
                with suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)
        if not self.pids:
            self._process.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
        while self.is_open and self.alive() and time.monotonic() < deadline:
            mp_connection.wait([self._connection], deadline - time.monotonic())
            self.poll()
        self._process.kill()
        self._wait_exit_code()
        self._connection.close()


def main() -> None:
    """Of the process itself."""
    line, supervisor = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(supervisor)
    try:
        import engine.training.train  # noqa: F401 (for the ranks)

        problem: Exception | None = None
    except Exception as error:
        problem = error
    try:
        job, environment = line.recv()
        handles = [recv_handle(line) for _ in range(1 + job.plan.local_world_size)]
    except EOFError:
        # No run came of it.
        os._exit(0)
    try:
        if problem is not None:
            raise problem
        os.environ.update(environment)
        redirect_output(job.folder.log if job.folder else None)
        processes, store = _fork(job, handles, line)
    except Exception as error:
        # What has been forked already goes with this process.
        line.send(rank_failure(0, job.plan.devices[0], error))
        os._exit(1)
    line.send(RanksStarted(tuple(process.pid or 0 for process in processes)))
    _report_exits(processes, line)
    del store
    os._exit(0)


def _fork(job: Job, fds: Sequence[int], supervisor_connection: Connection) -> tuple[list[BaseProcess], Any]:
    """All ranks, and then the store by which they meet, which lasts as long as what is returned."""
    import torch.distributed as dist
    import torch.multiprocessing as mp

    heartbeats, connections = Heartbeats(job.plan.local_world_size, fds[0]), [Connection(handle) for handle in fds[1:]]
    listening = socket.create_server(("127.0.0.1", 0), backlog=max(128, job.plan.local_world_size))
    arguments = (job, Inherited(connections, heartbeats, supervisor_connection, os.getpid(), listening))
    # What is there now is there for good, and shared: a collection in a rank would copy its pages.
    gc.freeze()
    processes = mp.start_processes(
        run_rank, arguments, job.plan.local_world_size, join=False, start_method="fork"
    ).processes
    for connection in connections:
        connection.close()
    # It starts a thread.
    store = dist.TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return list(processes), store


def _report_exits(processes: Sequence[BaseProcess], supervisor_connection: Connection) -> None:
    """Of each rank, as soon as it has ended. None is reaped: its pid is not to become another's while the supervisor
    may still send it a signal."""
    left = {process.sentinel: (rank, process.pid or 0) for rank, process in enumerate(processes)}
    ending: list[tuple[int, int]] = []
    while left or ending:
        ready = mp_connection.wait(list(left), EXIT_POLL_SECONDS if ending else None)
        ending += [left.pop(sentinel) for sentinel in list(left) if sentinel in ready]
        for one in list(ending):
            rank, pid = one
            # A rank whose files are closed already may hang in the kernel for ever.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                ending.remove(one)
                supervisor_connection.send(
                    RankExited(rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                )
