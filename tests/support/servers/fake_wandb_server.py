"""A server that speaks what `gputrain runs sync --service wandb` needs of W&B's protocol: runs, history, resuming.

It keeps history lines as the real one does: each upload names the line that it begins with.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

API_KEY = "0123456789" * 4
PROJECT = {"id": "P", "name": "gputrain", "entity": {"id": "E", "name": "me"}}


@dataclass
class UploadedRun:
    """One run at the server."""

    lines: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each history line."""
        rows = [json.loads(line) for line in self.lines]
        return [(row["_step"], row["train/loss"]) for row in rows]


class FakeWandbServer(ThreadingHTTPServer):
    """Keeps the uploaded runs in `runs`, by ID."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, UploadedRun] = {}
        self.refuses = False
        """Whether every request is answered with 401."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a command uses this server."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {"WANDB_BASE_URL": url, "WANDB_API_KEY": API_KEY, "WANDB_MODE": "online"}

    def answer(self, operation: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL response."""
        if operation == "UpsertBucket":
            is_new = values["name"] not in self.runs
            run = self.runs.setdefault(values["name"], UploadedRun())
            run.tags = values.get("tags") or run.tags
            bucket = {"id": "R", "name": values["name"], "displayName": values["displayName"], "project": PROJECT}
            bucket["historyLineCount"] = len(run.lines)
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if operation == "RunResumeStatus":
            found = self.runs.get(values["name"])
            return {"model": PROJECT | {"bucket": None if found is None else _resume_status(values["name"], found)}}
        if operation == "CreateRunFiles":
            url = f"http://127.0.0.1:{self.server_port}/file"
            files = [{"name": name, "uploadUrl": url} for name in values["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        # Old clients crash without an answer to this.
        return {"serverInfo": {"features": []}} if operation == "ServerFeaturesQuery" else {}

    def receive(self, run_id: str, upload: dict[str, Any]) -> None:
        """Add uploaded lines to the history of a run."""
        run = self.runs[run_id]
        history = (upload.get("files") or {}).get("wandb-history.jsonl")
        if history is not None:
            run.lines[history["offset"] :] = history["content"]
        if upload.get("complete"):
            run.exit_code = upload["exitcode"]


def _resume_status(run_id: str, run: UploadedRun) -> dict[str, Any]:
    return {
        "id": "R",
        "name": run_id,
        "displayName": run_id,
        "summaryMetrics": "{}",
        "logLineCount": 0,
        "historyLineCount": len(run.lines),
        "eventsLineCount": 0,
        "historyTail": json.dumps(run.lines[-1:]),
        "eventsTail": "[]",
        "config": "{}",
        "tags": run.tags,
        # Without `t`, the run counts as one that was never started.
        "wandbConfig": '{"t": 1}',
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeWandbServer

    def do_POST(self) -> None:
        request = self._read_json()
        if self.server.refuses:
            self._send({"error": "invalid API key"}, 401)
        elif self.path.endswith("/graphql"):
            self._send({"data": self.server.answer(request["operationName"], request.get("variables") or {})})
        else:
            self.server.receive(self.path.split("/")[-2], request)
            self._send({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({})

    def _read_json(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_wandb_server() -> Iterator[FakeWandbServer]:
    with FakeWandbServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
