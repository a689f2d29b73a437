"""Set up a loader process, which torch's DataLoader forks from a rank, and end it when it cannot send a batch.

`engine.data.pipelines.loader` starts the processes.
"""

from __future__ import annotations

import gc
import os
import re
import secrets
import signal
import sys
import time
import traceback
from multiprocessing import connection
from multiprocessing.queues import Queue
from typing import NoReturn

from engine.utils.process import STOP_SIGNALS, die_with_parent

WORKER_EXIT_SECONDS = 0.5  # bounds the wait for a dying worker to exit


def init_worker(rank_pid: int, _: int) -> None:
    """Set up a DataLoader worker: it dies with its rank, and ignores stop signals because its rank handles them."""
    die_with_parent(rank_pid)
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    # The names of a million images take a tenth of a second to traverse, and to visit an object copies its memory page.
    gc.freeze()
    connection.arbitrary_address = _abstract_socket_address  # type: ignore[attr-defined]
    # The default handler prints the error and drops the batch, and the rank would wait for that batch forever.
    Queue._on_queue_feeder_error = staticmethod(lambda error, _: exit_unable_to_send(error))  # type: ignore[attr-defined]


def _abstract_socket_address(_: str) -> str:
    """Return the address of the socket over which a DataLoader worker passes file descriptors to its rank.

    A killed worker would leave a socket file in $TMPDIR, and a long $TMPDIR exceeds the length limit of a socket path.
    An address in the abstract namespace (unix(7)) avoids both. multiprocessing's authentication key controls access.
    """
    return f"\0gputrain-{os.getpid()}-{secrets.token_hex(8)}"


def exit_unable_to_send(error: BaseException) -> NoReturn:
    """Exit this DataLoader worker because it cannot send a batch.

    If shared memory is full it exits by SIGBUS, the signal that the kernel sends when a write to /dev/shm runs out of
    memory, so that the rank reports both cases alike.
    """
    traceback.print_exception(error)
    sys.stderr.flush()
    shm_full = "torch_" in str(error) and re.search(r"No space left|Cannot allocate memory", str(error))
    if shm_full:
        os.kill(os.getpid(), signal.SIGBUS)
        # The signal may be delivered to another thread; do not reach os._exit before it takes effect.
        time.sleep(WORKER_EXIT_SECONDS)
    os._exit(1)
