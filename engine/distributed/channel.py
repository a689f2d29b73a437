"""The line between one rank and the owner of its run: events go up, requests come down."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from engine.distributed.watchdog import Marker, Place
from engine.runs.control import Asked
from engine.runs.events import Event, Flush
from engine.runs.journal import from_line, to_line

# The supervisor's answer to a `Flush`.
FLUSHED = "flushed"


class Channel(Protocol):
    """A rank's end."""

    def send(self, event: Event) -> None: ...
    def asked(self) -> Asked: ...
    def flush(self) -> None:
        """Returns when all that was sent is in the journal, and that on the disk."""
        ...

    def at(self, step: int, place: Place) -> None:
        """This rank has done so many steps, and is at a place now."""
        ...


class StopFlag:
    """Set by a signal handler, which may do nothing else."""

    def __init__(self) -> None:
        self.raised = False
        self.by = ""
        self.warned = False
        """SIGUSR1 came: the time of the job is nearly over."""

    def raise_it(self, number: int, *_: object) -> None:
        self.raised = True
        self.by = signal.Signals(number).name
        self.warned = self.warned or number == signal.SIGUSR1


class PipeChannel:
    """The end of a spawned rank. Each rank has a pipe of its own, so none can block or tear another's."""

    def __init__(self, connection: Connection, flag: StopFlag, marker: Marker) -> None:
        self.at = marker.at
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._flag = flag
        self._asked = Asked()
        self._rest = b""
        self._flushed = False

    def send(self, event: Event) -> None:
        self._socket.sendall(to_line(event).encode() + b"\n")

    def flush(self) -> None:
        """Raises ConnectionError where the supervisor has gone."""
        self._flushed = False
        self.send(Flush())
        while not self._flushed:
            self._take(self._socket.recv(4096))

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionError("the supervisor has gone")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == FLUSHED.encode():
                self._flushed = True
            else:
                self._asked.take(line.decode())

    def asked(self) -> Asked:
        with suppress(BlockingIOError):
            self._take(self._socket.recv(4096, socket.MSG_DONTWAIT))
        self._asked.stop = self._asked.stop or self._flag.raised
        return self._asked


class DirectChannel:
    """The end of a rank that has no supervisor: rank 0 records its events itself, the others have no one to tell.
    `between` is called whenever it is asked, and must not wait."""

    def __init__(
        self,
        record: Callable[[Event], None] | None,
        flag: StopFlag,
        asked: Asked,
        marker: Marker,
        between: Callable[[], None] | None = None,
    ) -> None:
        self.at = marker.at
        self._record, self._flag, self._asked, self._between = record, flag, asked, between

    def send(self, event: Event) -> None:
        if self._record is not None:
            self._record(event)

    def flush(self) -> None:
        self.send(Flush())

    def asked(self) -> Asked:
        if self._between is not None:
            self._between()
        self._asked.stop = self._asked.stop or self._flag.raised
        return self._asked


class SupervisorEnd:
    """The supervisor's end of one rank's pipe. Never waits: half a message stays in the buffer until the rest comes."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._socket.setblocking(False)
        connection.close()
        self._rest = b""
        self.open = True

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
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [event for line in lines if (event := from_line(line.decode(errors="replace"))) is not None]

    def request(self, name: str) -> None:
        with suppress(OSError):
            self._socket.send(name.encode() + b"\n")

    def close(self) -> None:
        self.open = False
        self._socket.close()
