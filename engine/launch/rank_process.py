"""One rank process that the fork server forks: its signals, its training, and how it reports its end."""

from __future__ import annotations

import faulthandler
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

from engine.distributed.channel import PipeChannel, StopFlag
from engine.distributed.failures import rank_failure
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import open_local_store, open_store
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.runs.events import ConfigRejected
from engine.training.job import ExitCode, Job
from engine.utils.errors import UsageError, problems_to_json
from engine.utils.process import STOP_SIGNALS, die_with_parent, exit_now

# A rank writes the tracebacks of its threads to the log.
DUMP_TRACEBACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Inherited:
    """What each rank inherits from the fork server.

    `connections` holds the ranks' ends of the pipes. `store_fd` is the file of the store, which is used unless
    `device.init_method` names another rendezvous."""

    connections: list[Connection]
    heartbeats: Heartbeats
    fork_server_connection: Connection
    fork_server_pid: int
    store_fd: int


def run_rank(rank: int, job: Job, inherited: Inherited) -> None:
    """Train as one rank, and exit the process."""
    connections = inherited.connections
    die_with_parent(inherited.fork_server_pid)
    # The peer reads EOF only when every copy of this end is closed.
    for connection in (inherited.fork_server_connection, *connections[:rank], *connections[rank + 1 :]):
        connection.close()
    faulthandler.enable()
    faulthandler.register(DUMP_TRACEBACK_SIGNAL, all_threads=True)
    flag = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, flag.handle_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    channel = PipeChannel(connections[rank], flag, HeartbeatWriter(inherited.heartbeats, rank))
    rank_info = RankInfo(rank, job.plan.local_world_size, rank, job.plan.local_world_size)
    code = ExitCode.FAILED
    try:
        from engine.training.train import train

        if job.config.device.init_method == "auto":
            store = open_local_store(inherited.store_fd, job.config.device.timeout)
        else:
            store = open_store(job.config, rank_info)
        outcome = train(job, rank_info, store, channel)
        code = ExitCode.STOPPED if outcome == "stopped" else ExitCode.FINISHED
    except UsageError as error:
        channel.send(ConfigRejected(problems=problems_to_json(error.problems)))
        code = ExitCode.USAGE_ERROR
    except BaseException as error:
        channel.send(rank_failure(rank, job.plan.devices[rank], error, job.config))
    finally:
        # The interpreter's own exit would wait for DataLoader workers, which ignore SIGINT.
        exit_now(code)
