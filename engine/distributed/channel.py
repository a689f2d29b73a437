"""The line between one rank and the owner of its run: events go up, requests come down."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from engine.distributed.watchdog import HeartbeatWriter, Phase
from engine.runs.control import RequestCounters
from engine.runs.events import Event, FlushJournal
from engine.runs.journal import from_line, to_line

# The supervisor's answer to a `FlushJournal`.
FLUSH_ACK = "flushed"


class Channel(Protocol):
    """A rank's end."""

    def send(self, event: Event) -> None: ...
    def poll_requests(self) -> RequestCounters: ...
    def flush(self) -> None:
        """Returns when all that was sent is in the journal, and that on the disk."""
        ...

    def enter_phase(self, step: int, phase: Phase) -> None:
        """This rank has done so many steps, and is at a place now."""
        ...


class StopFlag:
    """Set by a signal handler, which may do nothing else."""

    def __init__(self) -> None:
        self.is_set = False
        self.signal_name = ""
        self.time_limit_near = False
        """SIGUSR1 came: the time of the job is nearly over."""

    def handle_signal(self, signum: int, *_: object) -> None:
        self.is_set = True
        self.signal_name = signal.Signals(signum).name
        self.time_limit_near = self.time_limit_near or signum == signal.SIGUSR1


class PipeChannel:
    """The end of a forked rank. Each rank has a pipe of its own, so none can block or tear another's."""

    def __init__(self, connection: Connection, stop_flag: StopFlag, heartbeat: HeartbeatWriter) -> None:
        self.enter_phase = heartbeat.enter_phase
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._stop_flag = stop_flag
        self._requests = RequestCounters()
        self._buffer = b""
        self._flushed = False

    def send(self, event: Event) -> None:
        self._socket.sendall(to_line(event).encode() + b"\n")

    def flush(self) -> None:
        """Raises ConnectionError where the supervisor has gone."""
        self._flushed = False
        self.send(FlushJournal())
        while not self._flushed:
            self._consume(self._socket.recv(4096))

    def _consume(self, data: bytes) -> None:
        if not data:
            raise ConnectionError("the supervisor has gone")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == FLUSH_ACK.encode():
                self._flushed = True
            else:
                self._requests.apply(line.decode())

    def poll_requests(self) -> RequestCounters:
        with suppress(BlockingIOError):
            self._consume(self._socket.recv(4096, socket.MSG_DONTWAIT))
        self._requests.stop = self._requests.stop or self._stop_flag.is_set
        return self._requests


class DirectChannel:
    """The end of a rank that has no supervisor: rank 0 records its events itself, the others have no one to tell.
    `on_poll` is called whenever it is asked, and must not wait."""

    def __init__(
        self,
        record: Callable[[Event], None] | None,
        stop_flag: StopFlag,
        requests: RequestCounters,
        heartbeat: HeartbeatWriter,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        self.enter_phase = heartbeat.enter_phase
        self._record, self._stop_flag, self._requests, self._on_poll = record, stop_flag, requests, on_poll

    def send(self, event: Event) -> None:
        if self._record is not None:
            self._record(event)

    def flush(self) -> None:
        self.send(FlushJournal())

    def poll_requests(self) -> RequestCounters:
        if self._on_poll is not None:
            self._on_poll()
        self._requests.stop = self._requests.stop or self._stop_flag.is_set
        return self._requests


class RankConnection:
    """The supervisor's end of one rank's pipe. Never waits: half a message stays in the buffer until the rest comes."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._buffer = b""
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Event]:
        """Every whole event that has come in; closes at the other end's end."""
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
        return [event for line in lines if (event := from_line(line.decode(errors="replace"))) is not None]

    def send(self, message: str) -> None:
        with suppress(OSError):
            self._socket.send(message.encode() + b"\n")

    def close(self) -> None:
        self.is_open = False
        self._socket.close()
