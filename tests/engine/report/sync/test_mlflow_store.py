"""MLflow: a database, a server that is gone, addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.report.sync.mlflow_store import MlflowSync
from engine.report.sync.run_sync import RunSync, SyncError, without_credentials
from engine.runs.folder import RunFolder
from support.messages import raises_problem
from support.runs.event_factories import make_run_started
from support.runs.factories import make_losses, make_run_folder


def sync_to(uri: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunSync:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sync = MlflowSync(folder, "flowers")
    sync.poll()
    return sync


def test_server_that_is_gone_is_told_without_password(
    mlflow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_losses(1, 5))
    with pytest.raises(SyncError) as caught:
        sync_to("http://me:secret@127.0.0.1:9", folder, monkeypatch)
    assert "MLFLOW_TRACKING_URI" in str(caught.value) and "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_store_needs_tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with raises_problem("missing-value", "MLFLOW_TRACKING_URI", "http://127.0.0.1:5000"):
        MlflowSync(RunFolder(tmp_path), None)


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
