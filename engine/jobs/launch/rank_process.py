"""One rank process that the rank starter forks or spawns: its signals, its training, and how it reports its end."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.base.exit_codes import ExitCode
from engine.base.process import STOP_SIGNALS, SignalHandler, die_with_parent, exit_now
from engine.runs.events import ConfigRejected
from engine.train.distributed.channel import PipeChannel
from engine.train.distributed.failures import rank_failure
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import open_local_store, open_store
from engine.train.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.train.loop.job import Job

# A rank writes the tracebacks of its threads to the log.
DUMP_TRACEBACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class InheritedFd:
    """File descriptor that a rank inherits, as an argument of its process.

    A forked rank has all descriptors of its parent, a spawned one only those that are pickled like this."""

    number: int

    def __reduce__(self) -> tuple[Callable[[Any], InheritedFd], tuple[Any]]:
        return _unpickle_fd, (DupFd(self.number),)


def _unpickle_fd(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


@dataclass(frozen=True)
class Inherited:
    """What each rank inherits from the rank starter.

    `connections` holds the ranks' ends of the pipes. `store` is the file of the store, which is used unless
    `device.init_method` names another rendezvous."""

    connections: list[Connection]
    heartbeats: InheritedFd
    store: InheritedFd
    starter_connection: Connection
    starter_pid: int


def run_spawned_rank(rank: int, job_file: InheritedFd, inherited: Inherited) -> None:
    """Train as one rank, and exit the process. `job_file` contains the pickled job."""
    with _exit_on_error():
        # All ranks inherit the same file offset, so the file is opened anew.
        with Path(f"/proc/self/fd/{job_file.number}").open("rb") as file:
            job = pickle.load(file)
        os.close(job_file.number)
    run_rank(rank, job, inherited)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit with the traceback of an error that no channel can send yet.

    torch would write it to a file in TMPDIR, which the supervisor does not read."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        exit_now(ExitCode.FAILED)


def run_rank(rank: int, job: Job, inherited: Inherited) -> None:
    """Train as one rank, and exit the process."""
    with _exit_on_error():
        channel = _open_channel(rank, job, inherited)
    rank_info = RankInfo(rank, job.plan.local_world_size, rank, job.plan.local_world_size)
    # User code may read them. Those of an outer launcher describe another process.
    os.environ.update(rank_info.variables())
    code = ExitCode.FAILED
    try:
        from engine.train.loop.train import train

        if job.config.device.init_method == "auto":
            store = open_local_store(inherited.store.number, job.config.device.timeout)
        else:
            store = open_store(job.config, rank_info)
        outcome = train(job, rank_info, store, channel)
        code = ExitCode.STOPPED if outcome == "stopped" else ExitCode.FINISHED
    except UsageError as error:
        channel.send(ConfigRejected(problems=error.problems))
        code = ExitCode.USAGE_ERROR
    except BaseException as error:
        channel.send(rank_failure(rank, job.plan.devices[rank], error, job.config))
    finally:
        # The interpreter's own exit would wait for DataLoader workers, which ignore SIGINT.
        exit_now(code)


def _open_channel(rank: int, job: Job, inherited: Inherited) -> PipeChannel:
    """Install the signal handlers of the rank, and open its channel to the supervisor."""
    connections = inherited.connections
    die_with_parent(inherited.starter_pid)
    # The peer reads EOF only when every copy of this end is closed.
    for connection in (inherited.starter_connection, *connections[:rank], *connections[rank + 1 :]):
        connection.close()
    faulthandler.enable()
    faulthandler.register(DUMP_TRACEBACK_SIGNAL, all_threads=True)
    signals = SignalHandler()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.install((signal.SIGTERM, signal.SIGUSR1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    heartbeats = Heartbeats(job.plan.local_world_size, inherited.heartbeats.number)
    return PipeChannel(connections[rank], signals, HeartbeatWriter(heartbeats, rank))
