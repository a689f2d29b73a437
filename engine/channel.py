"""The line between one rank and the owner of its run: events go up, the wish to stop comes down."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from engine.events import Event, from_line, to_line

STOP = b"stop\n"


class Channel(Protocol):
    """A rank's end."""

    def send(self, event: Event) -> None: ...
    def stop_requested(self) -> bool: ...


class StopFlag:
    """Set by a signal handler, which may do nothing else."""

    def __init__(self) -> None:
        self.raised = False

    def raise_it(self, *_: object) -> None:
        self.raised = True


class PipeChannel:
    """The end of a spawned rank. Each rank has a pipe of its own, so none can block or tear another's."""

    def __init__(self, connection: Connection, flag: StopFlag) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._flag = flag

    def send(self, event: Event) -> None:
        self._socket.sendall(to_line(event).encode() + b"\n")

    def stop_requested(self) -> bool:
        if not self._flag.raised:
            with suppress(BlockingIOError):
                self._flag.raised = bool(self._socket.recv(64, socket.MSG_DONTWAIT))
        return self._flag.raised


class DirectChannel:
    """The end of a rank that has no supervisor: rank 0 records its events itself, the others have no one to tell.
    `between` is called at every step, and must not wait."""

    def __init__(
        self, record: Callable[[Event], None] | None, flag: StopFlag, between: Callable[[], None] | None = None
    ) -> None:
        self._record, self._flag, self._between = record, flag, between

    def send(self, event: Event) -> None:
        if self._record is not None:
            self._record(event)

    def stop_requested(self) -> bool:
        if self._between is not None:
            self._between()
        return self._flag.raised


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

    def request_stop(self) -> None:
        try:
            self._socket.send(STOP)
        except OSError:
            return

    def close(self) -> None:
        self.open = False
        self._socket.close()
