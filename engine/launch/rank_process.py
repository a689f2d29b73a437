"""One rank that a supervisor spawned: its place among processes, and how its end is told."""

from __future__ import annotations

import faulthandler
import signal
import socket
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from engine.distributed.channel import PipeChannel, StopFlag
from engine.distributed.failures import failure_of
from engine.distributed.rank_env import Seat
from engine.distributed.rendezvous import open_store
from engine.distributed.watchdog import Beats, Marker
from engine.runs.events import Refused
from engine.training.job import ExitCode, Job
from engine.utils.errors import UsageError
from engine.utils.process import STOPPING, die_with_parent, leave

# Makes a rank write to the log where in its code it is.
TELL_WHERE = signal.SIGUSR2


@dataclass(frozen=True)
class Inherited:
    """What the fork server leaves to each rank that it forks. ``connections`` holds the rank's end of each pipe;
    ``store_socket`` listens where the store of the ranks will be, unless ``device.init_method`` says where to meet."""

    connections: list[Connection]
    heartbeats: Beats
    fork_server_connection: Connection
    fork_server_pid: int
    store_socket: socket.socket


def run_rank(rank: int, job: Job, inherited: Inherited) -> None:
    """The whole life of the process."""
    connections, store_socket = inherited.connections, inherited.store_socket
    die_with_parent(inherited.fork_server_pid)
    # A process that is gone must not seem alive by a copy that is kept here.
    for connection in (inherited.fork_server_connection, *connections[:rank], *connections[rank + 1 :]):
        connection.close()
    port = store_socket.getsockname()[1]
    store_socket.close()
    faulthandler.enable()
    faulthandler.register(TELL_WHERE, all_threads=True)
    flag = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, flag.raise_it)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    channel = PipeChannel(connections[rank], flag, Marker(inherited.heartbeats, rank))
    seat = Seat(rank, job.plan.ranks, rank, job.plan.ranks)
    code = ExitCode.FAILED
    try:
        import torch.distributed as dist

        from engine.training.train import train

        timeout = timedelta(seconds=job.config.device.timeout)
        if job.config.device.init_method == "auto":
            store: dist.Store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        else:
            store = open_store(job.config, seat)
        outcome = train(job, seat, store, channel)
        code = ExitCode.STOPPED if outcome == "stopped" else ExitCode.FINISHED
    except UsageError as error:
        channel.send(Refused(problems=[[problem.where, problem.what] for problem in error.problems]))
        code = ExitCode.REFUSED
    except BaseException as error:
        channel.send(failure_of(rank, job.plan.devices[rank], error, job.config))
    finally:
        # Whatever comes: the interpreter's own end would wait for loader processes, which do not hear it.
        leave(code)
