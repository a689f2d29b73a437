"""MLflow: a database, errors of a server, names and addresses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from engine.runs.events import RunFinished
from engine.runs.folder import RunFolder
from engine.sync.mlflow_store import MlflowStore
from engine.sync.remote import SyncError, without_credentials
from engine.sync.run_sync import RunSync
from engine.sync.state import open_state
from support.messages import raises_problem, says
from support.runs.event_factories import make_run_resumed, make_run_started
from support.runs.factories import append_events, make_losses, make_run_folder
from support.servers.remote_runs import mlflow_points, mlflow_runs


def sync_to(uri: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunSync:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with open_state(folder, "mlflow") as state:
        sync = RunSync(folder, MlflowStore("flowers"), state)
        sync.poll()
    return sync


@contextmanager
def server_that_answers(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"no")

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.nightly
def test_database_has_each_step_once_after_resume(
    mlflow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_losses(1, 12))
    assert sync_to(uri, folder, monkeypatch).state.location.startswith(f"{uri} experiment flowers run ")
    finished = RunFinished(time=90.0, state="finished")
    append_events(folder, make_run_resumed(10, time=20.0), make_losses(11, 20, loss=0.25, time=30.0), finished)
    assert sync_to(uri, folder, monkeypatch).replaced
    [run] = mlflow_runs(uri, "flowers")
    points = mlflow_points(uri, run.info.run_id)
    assert sorted(points["train/loss"]) == [(step, 0.5 if step <= 10 else 0.25) for step in range(1, 21)]


def test_server_that_is_gone_is_told_without_password(
    mlflow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 5))
    with pytest.raises(SyncError) as caught:
        sync_to("http://me:secret@127.0.0.1:9", folder, monkeypatch)
    assert caught.value.temporary and caught.value.code == "connection-failed"
    assert "MLFLOW_TRACKING_URI" in str(caught.value) and "secret" not in str(caught.value)
    assert "secret" not in (folder.sync / "mlflow.json").read_text()


@pytest.mark.parametrize(("status", "code"), [(401, "access-denied"), (403, "access-denied"), (500, "service-failed")])
def test_answer_of_server_is_told_in_one_line(
    mlflow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 5))
    with server_that_answers(status) as host, pytest.raises(SyncError) as caught:
        sync_to(f"http://me:secret@{host}", folder, monkeypatch)
    assert caught.value.code == code and says(str(caught.value), code, f"http://{host} ")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_store_needs_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises_problem("missing-value", "MLFLOW_TRACKING_URI", "http://127.0.0.1:5000"):
        MlflowStore(None)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:pass@host:5000/path?token=x#y", "http://host:5000/path"),
        ("sqlite:////var/mlflow.db", "sqlite:////var/mlflow.db"),
        ("postgresql://me:p@ss@host/db?password=x", "postgresql://host/db"),
        ("/data/mlruns", "/data/mlruns"),
    ],
)
def test_address_has_no_credentials(uri: str, shown: str) -> None:
    assert without_credentials(uri) == shown
