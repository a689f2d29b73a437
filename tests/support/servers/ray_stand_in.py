"""A job server of Ray: it keeps the jobs that it gets, and tells the states that a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine.runs.batch.states import forget


class RayStandIn(ThreadingHTTPServer):
    """`jobs` are those of its answers by their submission ID, `pending` the placement groups that wait. A `refusal`
    answers each request instead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pending: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.refusal = ""

    @property
    def place(self) -> str:
        """What `--on` calls it."""
        return f"ray:127.0.0.1:{self.server_port}"

    def tell(self, status: str, **fields: Any) -> None:
        """Set what it says of the job that was submitted last."""
        [*_, last] = self.jobs.values()
        last |= {"status": status, **fields}
        forget(self.place)


class _Handler(BaseHTTPRequestHandler):
    server: RayStandIn

    def do_GET(self) -> None:
        is_group = self.path.startswith("/api/v0/placement_groups?")
        groups = {"data": {"result": {"result": self.server.pending}}}
        self._answer(groups if is_group else [*self.server.jobs.values()])

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/api/jobs/" and not self.server.refusal:
            self.server.jobs[content["submission_id"]] = {"status": "PENDING", "message": "Waiting.", **content}
        self._answer({})

    def _answer(self, content: object) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.send_response(500 if self.server.refusal else 200)
        self.end_headers()
        self.wfile.write((self.server.refusal or json.dumps(content)).encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def ray_stand_in() -> Iterator[RayStandIn]:
    """Serve until the block ends."""
    with RayStandIn() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
