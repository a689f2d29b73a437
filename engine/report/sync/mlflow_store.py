"""Send runs to an MLflow tracking server or database through its client library.

A param of MLflow cannot change, so a value that a resume has changed becomes the tag `changed.section.key`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.base.errors import UsageError, not_installed
from engine.report.sync.rows import Row, batches
from engine.report.sync.run_sync import MAX_TEXT_CHARACTERS, RunSync, as_text, without_credentials
from engine.runs.folder import RunFolder, RunState
from engine.runs.labels import RunLabels

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "gputrain"
# Limits of one request, of mlflow.utils.validation.
MAX_METRICS, MAX_PARAMS, MAX_KEY_CHARACTERS = 1000, 100, 250
TOKEN_TAG = "gputrain.sync"  # noqa: S105 - not a secret
SENT_TAG = "gputrain.sent"
"""Holds the last step that has arrived, and the state of the run once its figures have."""
# The client's own defaults wait for minutes: 7 attempts of up to 120 s, with pauses that double.
CLIENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    # The file store is a choice of whoever names a folder as tracking URI.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
STATUSES: dict[str, str] = {RunState.FINISHED: "FINISHED", RunState.STOPPED: "KILLED"}


class MlflowSync(RunSync):
    """Copies a run to an experiment at a tracking URI, which is created if it does not exist."""

    advice = "check the server, MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN"

    def __init__(self, folder: RunFolder, experiment: str | None) -> None:
        """Take URI and credentials from MLflow's own variables. Raises UsageError if there is no URI."""
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self._uri:
            # The library would create the database mlflow.db in the working folder.
            reason = "is not set; name a server or database, such as http://127.0.0.1:5000 or sqlite:////DIR/mlflow.db"
            raise UsageError.one("MLFLOW_TRACKING_URI", reason, code="missing-value")
        if find_spec("mlflow") is None:
            raise UsageError.one("--service mlflow", not_installed("mlflow-skinny"), code="not-installed")
        self._address = without_credentials(self._uri)
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        super().__init__(folder, f"{self._address} {self._experiment}")

    @cached_property
    def _client(self) -> MlflowClient:
        """Client of the library, which takes seconds to import."""
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.ERROR)
        return MlflowClient(tracking_uri=self._uri)

    def open(self, token: str, config: Mapping[str, Any], labels: RunLabels, started_at: float | None) -> None:
        from mlflow.entities import Param, RunTag

        client, name = self._client, self.folder.name
        found = client.get_experiment_by_name(self._experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(self._experiment)
        if runs := client.search_runs([experiment_id], f"tags.`{TOKEN_TAG}` = '{token}'", max_results=1):
            run = runs[0]
        else:
            created_tags = {TOKEN_TAG: token, "mlflow.source.name": "gputrain", "mlflow.source.type": "LOCAL"}
            start_ms = None if started_at is None else _milliseconds(started_at)
            run = client.create_run(experiment_id, start_ms, created_tags, name)
        self._run_id = run_id = run.info.run_id
        self._sent_tag, known = run.data.tags.get(SENT_TAG, "0"), run.data.params
        self.sent_step = int(self._sent_tag.partition(" ")[0])
        client.update_run(run_id, status="RUNNING")
        params = {_key(key): as_text(value) for key, value in config.items() if value is not None}
        tags = {f"changed.{key}": value for key, value in params.items() if known.get(key, value) != value}
        tags |= {"gputrain.tags": ", ".join(labels.tags), "mlflow.note.content": labels.note, "mlflow.runName": name}
        for some in batches((Param(key, value) for key, value in params.items() if key not in known), MAX_PARAMS):
            client.log_batch(run_id, params=some)
        for changed in batches((RunTag(key, value) for key, value in tags.items()), MAX_PARAMS):
            client.log_batch(run_id, tags=changed)
        self.location = f"{self._address} experiment {self._experiment} run {run_id}"
        if self._address.startswith(("http://", "https://")):
            self.location = f"{self._address.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"

    def send(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        metrics = (
            Metric(_key(name), value, _milliseconds(row.time), row.step)
            for row in rows
            for name, value in row.metrics.items()
        )
        for some in batches(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=some)
        self._client.set_tag(self._run_id, SENT_TAG, str(rows[-1].step))

    def finish(self, figures: Row, message: str) -> None:
        if self._sent_tag != (tag := f"{figures.step} {self.run_state}"):
            self.send([figures])
        self._client.set_tag(self._run_id, SENT_TAG, tag)
        self._client.set_tag(self._run_id, "gputrain.state", str(self.run_state))
        self._client.set_tag(self._run_id, "gputrain.message", message[:MAX_TEXT_CHARACTERS])
        status = STATUSES.get(self.run_state, "FAILED")
        self._client.set_terminated(self._run_id, status, _milliseconds(figures.time))

    def leave(self) -> None:
        """Do nothing: the status of a run that goes on remains RUNNING."""


def _milliseconds(time: float) -> int:
    return round(time * 1000)


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_KEY_CHARACTERS]
