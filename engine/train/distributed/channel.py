"""Connection between a rank and the owner of its run: events to the owner, control requests to the rank.

The owner is the supervisor, or rank 0 itself under torchrun and srun. `engine.train.loop` uses `Channel`,
`engine.jobs.launch.ranks` the other end, `RankConnection`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock

from engine.base.codec import encode
from engine.base.process import SignalHandler
from engine.runs.control import RequestCounters
from engine.runs.events import Event, FlushJournal
from engine.runs.journal import from_line
from engine.train.distributed.watchdog import HeartbeatWriter

# Reply of the supervisor to `FlushJournal`.
FLUSH_ACK = "flushed"


class Channel:
    """The rank's end of the connection. Only its main thread may use it, except for `set_saving` and `flush`.

    Without a supervisor (torchrun, srun), `record` receives the events: rank 0 records them itself, other ranks print
    theirs to stderr. `enter_phase` and `set_saving` are those of the heartbeat. `on_poll` is called by each
    `poll_requests` and must not block.
    """

    def __init__(
        self,
        record: Callable[[Event], None] | None,
        signals: SignalHandler,
        requests: RequestCounters,
        heartbeat: HeartbeatWriter,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        self.enter_phase, self.set_saving = heartbeat.enter_phase, heartbeat.set_saving
        self._record, self._signals, self._requests, self._on_poll = record, signals, requests, on_poll

    def send(self, event: Event) -> None:
        """Send an event to the owner of the run."""
        if self._record is not None:
            self._record(event)

    def flush(self) -> None:
        """Block until all sent events are in the journal on disk. Safe to call from another thread."""
        self.send(FlushJournal())

    def poll_requests(self) -> RequestCounters:
        """Return all requests received so far, without blocking."""
        if self._on_poll is not None:
            self._on_poll()
        if self._signals.is_set:
            self._requests.stop = True
        return self._requests


class PipeChannel(Channel):
    """Channel of a forked rank to its supervisor. Each rank has its own pipe, so no rank can block another or corrupt
    its messages."""

    def __init__(
        self,
        connection: Connection,
        signals: SignalHandler,
        heartbeat: HeartbeatWriter,
    ) -> None:
        super().__init__(None, signals, RequestCounters(), heartbeat)
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._buffer = b""
        self._flushed = False
        self._send_lock, self._receive_lock = Lock(), Lock()

    def send(self, event: Event) -> None:
        with self._send_lock:
            self._socket.sendall(encode(event) + b"\n")

    def flush(self) -> None:
        """See `Channel.flush`. Raises ConnectionError if the supervisor has exited."""
        self._flushed = False
        self.send(FlushJournal())
        with self._receive_lock:
            # The other thread may already have received the reply.
            while not self._flushed:
                self._consume(self._socket.recv(4096))

    def _consume(self, data: bytes) -> None:
        if not data:
            raise ConnectionError("the supervisor has exited")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == FLUSH_ACK.encode():
                self._flushed = True
            else:
                request, _, steps = line.decode().partition(" ")
                self._requests.apply(request, int(steps or 0))

    def poll_requests(self) -> RequestCounters:
        # Else a thread that flushes receives the requests.
        if self._receive_lock.acquire(blocking=False):
            try:
                self._consume(self._socket.recv(4096, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
            finally:
                self._receive_lock.release()
        return super().poll_requests()


class RankConnection:
    """The supervisor's end of one rank's pipe. It never blocks: an incomplete message stays in the buffer."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._buffer = b""
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Event]:
        """Return all complete events that have arrived; close if the rank has closed its end."""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [event for line in lines if (event := from_line(line)) is not None]

    def send(self, message: str) -> None:
        """Send a request or `FLUSH_ACK`; errors are ignored, because a dead rank is detected elsewhere."""
        with suppress(OSError):
            self._socket.send(message.encode() + b"\n")

    def close(self) -> None:
        self.is_open = False
        self._socket.close()
