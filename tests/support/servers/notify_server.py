"""A local HTTP server that receives notifications: it answers, refuses, or accepts connections and never answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class NotifyServer:
    """Address of the server, and the JSON bodies that it received; `status` is what it answers."""

    port: int = 0
    status: int = 200
    received: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """An apprise URL with a user and a password."""
        return f"json://sender:{PASSWORD}@127.0.0.1:{self.port}/hook"

    @property
    def titles(self) -> list[str]:
        return [str(message["title"]) for message in self.received]


PASSWORD = "hunter2secret"  # noqa: S105 (made up)


@contextmanager
def notify_server(status: int = 200) -> Iterator[NotifyServer]:
    server = NotifyServer(status=status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.received.append(json.loads(body))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.port = http.server_address[1]
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield server
        http.shutdown()


@contextmanager
def hanging_server() -> Iterator[NotifyServer]:
    """A server whose connections are accepted by the kernel, and that never reads or answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield NotifyServer(listener.getsockname()[1])


def gone_server() -> NotifyServer:
    """The address of a server that has ended: connections are refused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return NotifyServer(listener.getsockname()[1])
