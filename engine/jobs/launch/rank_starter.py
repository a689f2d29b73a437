"""The rank starter of a run: a process that imports torch and starts all ranks with `torch.multiprocessing`.

`RankStarter` is the supervisor's side, `main` the process itself. Forked ranks share its memory and need not import
anything, so a start costs one import of torch instead of one per rank. Spawned ranks inherit only file descriptors.
`choose_start_method` forks only where that is safe. The process dies with the supervisor, and the ranks die with it."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection as mp_connection
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Literal

from engine.base.errors import UsageError
from engine.base.process import STOP_SIGNALS, die_with_parent, redirect_output
from engine.jobs.launch.rank_process import Inherited, InheritedFd, run_rank, run_spawned_rank
from engine.runs.events import ConfigRejected, RankFailed
from engine.train.distributed.failures import rank_failure
from engine.train.distributed.rendezvous import create_store_file
from engine.train.distributed.watchdog import Heartbeats
from engine.train.loop.job import Job, StartMethod

PROGRAM = "from engine.jobs.launch.rank_starter import main; main()"
# OpenBLAS starts threads when NumPy is imported, and a process with threads must not fork. OpenMP threads spin while
# they wait for each other: if another process occupies one of the cores, long spinning costs 80% of the throughput.
THREAD_ENV = {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "5000"}
KILL_TIMEOUT_SECONDS = 3.0  # a killed process that is blocked in a driver or on a dead disk never exits
EXIT_POLL_SECONDS = 0.01  # between two polls of a rank that is exiting


@dataclass(frozen=True)
class RanksStarted:
    """All ranks have been started. Their pids stay valid until the rank starter exits, which reaps none of them."""

    pids: tuple[int, ...]


@dataclass(frozen=True)
class RankExited:
    """The exit of a rank; a negative `exit_code` is the number of a signal."""

    rank: int
    exit_code: int


class RankStarter:
    """The supervisor's handle of the process, which is started before the preflight to import torch meanwhile."""

    def __init__(self) -> None:
        mine, theirs = Pipe()
        # A signal often goes to all processes: the rank starter blocks it for good, a rank until it has handlers.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**THREAD_ENV, **os.environ},
            )
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        self._connection = mine
        self._exit_codes: dict[int, int] = {}
        self._num_ranks = 0
        self.pids: tuple[int, ...] = ()
        """PID of each rank; empty until the ranks are started."""
        self.failure: RankFailed | ConfigRejected | None = None
        """Why the ranks could not be started; None if they were."""
        self.died_early = False
        """Whether it exited before its ranks, which ended them."""

    def start_ranks(self, job: Job, connections: Sequence[Connection], heartbeats: Heartbeats) -> None:
        """Start the ranks with the current environment of this process, each with its end of a pipe, which is closed
        here."""
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
        """Whether more messages may arrive."""
        return not self._connection.closed

    def poll(self) -> None:
        """Handle the messages that have arrived, without blocking."""
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

    def _handle(self, message: RanksStarted | RankExited | RankFailed | ConfigRejected) -> None:
        if isinstance(message, RanksStarted):
            self.pids = message.pids
        elif isinstance(message, RankExited):
            self._exit_codes[message.rank] = message.exit_code
        else:
            self.failure = message

    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of a rank; None while it runs."""
        return self._exit_codes.get(rank)

    def alive(self) -> list[int]:
        """Return the ranks that have not exited, including those that have not been started yet."""
        return [rank for rank in range(self._num_ranks) if rank not in self._exit_codes]

    def kill(self) -> None:
        """Kill the rank starter and all ranks that still run."""
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
    """Run the rank starter: import torch, receive the job, start its ranks and report their exits."""
    pipe, supervisor = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(supervisor)
    # Most objects that an import creates stay, and collections take a sixth of the time in which torch is imported.
    gc.disable()
    try:
        import engine.train.loop.train  # noqa: F401 (for the ranks)

        problem: Exception | None = None
    except Exception as error:
        problem = error
    gc.freeze()
    gc.enable()
    try:
        job, environment = pipe.recv()
        handles = [recv_handle(pipe) for _ in range(1 + job.plan.local_world_size)]
    except EOFError:
        # The supervisor refused the run.
        os._exit(0)
    try:
        if problem is not None:
            raise problem
        os.environ.update(environment)
        try:
            redirect_output(job.folder.log if job.folder else None)
        except OSError:
            # The supervisor reports it. What the ranks print goes where its own messages go.
            redirect_output(None)
        if job.folder is not None:
            job.folder.restrict_umask()
        processes = _start_ranks(job, handles, pipe)
    except UsageError as error:
        pipe.send(ConfigRejected(problems=error.problems))
        os._exit(1)
    except Exception as error:
        # Ranks that have been started already die with this process.
        pipe.send(rank_failure(0, job.plan.devices[0], error))
        os._exit(1)
    pipe.send(RanksStarted(tuple(process.pid or 0 for process in processes)))
    _report_exits(processes, pipe)
    os._exit(0)


def _start_ranks(job: Job, fds: Sequence[int], supervisor_connection: Connection) -> list[BaseProcess]:
    """Start all ranks. Raises UsageError if they must not be forked, as requested."""
    connections, store_fd = [Connection(fd) for fd in fds[1:]], create_store_file()
    inherited = Inherited(
        connections=connections,
        heartbeats=InheritedFd(fds[0]),
        store=InheritedFd(store_fd),
        starter_connection=supervisor_connection,
        starter_pid=os.getpid(),
    )
    method = choose_start_method(job.config.device.start_method)
    start = _fork if method == "fork" else _spawn
    processes = start(replace(job, start_method=method), inherited)
    for connection in connections:
        connection.close()
    os.close(store_fd)
    return processes


def _fork(job: Job, inherited: Inherited) -> list[BaseProcess]:
    import torch.multiprocessing as mp

    # A garbage collection in a rank would write to the shared pages of these objects and so copy them.
    gc.freeze()
    context = mp.start_processes(
        run_rank, args=(job, inherited), nprocs=job.plan.local_world_size, join=False, start_method="fork"
    )
    return list(context.processes)


def _spawn(job: Job, inherited: Inherited) -> list[BaseProcess]:
    import torch.multiprocessing as mp

    # multiprocessing starts its resource tracker before the first rank, and then unblocks SIGINT and SIGTERM.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Not as an argument: a pipe holds 64 KiB of arguments, and each start would wait until the rank has imported torch.
    job_file = os.memfd_create("gputrain-job")
    with open(job_file, "wb", closefd=False) as file:
        pickle.dump(job, file)
    context = mp.spawn(
        run_spawned_rank, args=(InheritedFd(job_file), inherited), nprocs=job.plan.local_world_size, join=False
    )
    os.close(job_file)
    return list(context.processes)


def _report_exits(processes: Sequence[BaseProcess], supervisor_connection: Connection) -> None:
    """Report the exit of each rank.

    None is reaped: the kernel must not reuse its pid while the supervisor may still send it a signal."""
    running = {process.sentinel: (rank, process.pid or 0) for rank, process in enumerate(processes)}
    exiting: list[tuple[int, int]] = []
    while running or exiting:
        ready = mp_connection.wait(list(running), EXIT_POLL_SECONDS if exiting else None)
        exiting += [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
        for rank, pid in list(exiting):
            # Without blocking: a rank whose files are closed may hang in the kernel forever.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                exiting.remove((rank, pid))
                supervisor_connection.send(
                    RankExited(rank, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                )


# Files that a process opens when it initializes CUDA, or CUDA in WSL.
_GPU_FILES = ("/dev/nvidia", "/dev/dxg")


def choose_start_method(requested: Literal["auto", "spawn", "fork"]) -> StartMethod:
    """Return how this process must start ranks for `device.start_method`.

    Raises UsageError if fork is requested but not safe."""
    if requested == "spawn":
        return "spawn"
    obstacle = find_fork_obstacle()
    if obstacle is None:
        return "fork"
    if requested == "auto":
        return "spawn"
    reason = f"the ranks cannot be forked, because the process that starts them {obstacle}"
    raise UsageError.one("device.start_method", reason, "use auto or spawn", code="not-supported")


def find_fork_obstacle() -> str | None:
    """Return why this process must not fork ranks, as a predicate; None if a fork is safe.

    A forked child has none of the threads, but all locks that they held. CUDA does not work in a child of a process
    that has initialized it; every library that does so opens files of the driver."""
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"has {threads} threads"
    if torch.cuda.is_initialized() or any(target.startswith(_GPU_FILES) for target in _open_files()):
        return "uses a GPU"
    return None


def _open_files() -> list[str]:
    """Return the targets of all file descriptors of this process."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except FileNotFoundError:
            # The descriptor through which this folder is read.
            continue
    return targets
