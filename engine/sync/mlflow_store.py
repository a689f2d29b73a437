"""Send runs to an MLflow tracking server or database through its client library.

A param of MLflow cannot change, so a value that a resume has changed becomes the tag `changed.section.key`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.runs.folder import RunState
from engine.sync.rows import Row, batches
from engine.sync.run_sync import MAX_TEXT_CHARACTERS, RunDescription, without_credentials
from engine.sync.state import RemoteState
from engine.utils.codec import replace
from engine.utils.errors import UsageError, not_installed

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "gputrain"
# Limits of one request, of mlflow.utils.validation.
MAX_METRICS, MAX_PARAMS, MAX_KEY_CHARACTERS = 1000, 100, 250
TOKEN_TAG = "gputrain.sync"  # noqa: S105 - not a secret
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
STATUSES = {RunState.FINISHED: "FINISHED", RunState.STOPPED: "KILLED"}


class MlflowStore:
    """The experiment at a tracking URI. It is created if it does not exist."""

    name = "mlflow"

    def __init__(self, experiment: str | None) -> None:
        """Take URI and credentials from MLflow's own variables. Raises UsageError if there is no URI."""
        self._uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self._uri:
            # The library would create the database mlflow.db in the working folder.
            reason = (
                "is not set; name a server or a database, such as http://127.0.0.1:5000 or sqlite:////DIR/mlflow.db"
            )
            raise UsageError.one("MLFLOW_TRACKING_URI", reason, code="missing-value")
        if find_spec("mlflow") is None:
            raise UsageError.one("--service mlflow", not_installed("mlflow-skinny"), code="not-installed")
        self._address = without_credentials(self._uri)
        self._experiment_name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        self.destination = f"{self._address} {self._experiment_name}"

    def advice(self) -> str:
        """Return what helps if the service cannot be used."""
        return "check the server, MLFLOW_TRACKING_URI and MLFLOW_TRACKING_TOKEN"

    @cached_property
    def _client(self) -> MlflowClient:
        """Client of the library, which takes seconds to import."""
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.ERROR)
        return MlflowClient(tracking_uri=self._uri)

    @cached_property
    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment_name)
        return experiment.experiment_id if experiment else self._client.create_experiment(self._experiment_name)

    def open(self, state: RemoteState, description: RunDescription) -> MlflowRun:
        """Create the remote run, or continue the one in `state`, and send its description."""
        run = self._find_run(state)
        if run is None:
            state = replace(state, sent_step=0)
            start_ms = None if description.started_at is None else _milliseconds(description.started_at)
            tags = {TOKEN_TAG: state.token, "mlflow.source.name": "gputrain", "mlflow.source.type": "LOCAL"}
            run = self._client.create_run(self._experiment_id, start_ms, tags, description.name)
        run_id = run.info.run_id
        self._client.update_run(run_id, status="RUNNING")
        self._describe(run, description)
        location = f"{self._address} experiment {self._experiment_name} run {run_id}"
        if self._address.startswith(("http://", "https://")):
            location = f"{self._address.rstrip('/')}/#/experiments/{self._experiment_id}/runs/{run_id}"
        return MlflowRun(self._client, replace(state, run_id=run_id, location=location))

    def void(self, state: RemoteState) -> None:
        """Delete a remote run whose steps a resume has repeated. `mlflow runs restore` undoes it."""
        if (run := self._find_run(state)) is not None:
            self._client.set_tag(run.info.run_id, "gputrain.void", "a resume repeated steps of this run")
            self._client.delete_run(run.info.run_id)

    def _find_run(self, state: RemoteState) -> Any:
        """Return the remote run of a state, also if it was created just before a kill; None if there is none."""
        found = self._client.search_runs([self._experiment_id], f"tags.`{TOKEN_TAG}` = '{state.token}'", max_results=1)
        return found[0] if found else None

    def _describe(self, run: Any, description: RunDescription) -> None:
        from mlflow.entities import Param, RunTag

        known = run.data.params
        config = {_key(key): value[:MAX_TEXT_CHARACTERS] for key, value in description.flat_config().items()}
        tags = {f"changed.{key}": value for key, value in config.items() if known.get(key, value) != value}
        tags |= {"gputrain.tags": ", ".join(description.tags), "mlflow.note.content": description.note}
        tags["mlflow.runName"] = description.name
        for params in batches((Param(key, value) for key, value in config.items() if key not in known), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params)
        for some in batches((RunTag(key, value) for key, value in tags.items()), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, tags=some)


class MlflowRun:
    """A run of an experiment."""

    def __init__(self, client: MlflowClient, state: RemoteState) -> None:
        self.state, self.held_step = state, state.sent_step
        self._client = client

    def send(self, rows: Iterable[Row]) -> None:
        """Send rows, which follow each other."""
        from mlflow.entities import Metric

        metrics = (
            Metric(_key(name), value, _milliseconds(row.time), row.step)
            for row in rows
            for name, value in row.metrics.items()
        )
        for some in batches(metrics, MAX_METRICS):
            self._client.log_batch(self.state.run_id, metrics=some)

    def finish(self, state: RunState, figures: Row, message: str) -> None:
        """Record how the run ended, its final figures and the message of its end."""
        self.send([figures])
        self._client.set_tag(self.state.run_id, "gputrain.state", state.value)
        self._client.set_tag(self.state.run_id, "gputrain.message", message[:MAX_TEXT_CHARACTERS])
        status = STATUSES.get(state, "FAILED")
        self._client.set_terminated(self.state.run_id, status, _milliseconds(figures.time))

    def leave(self) -> None:
        """Do nothing: the status of a run that goes on remains RUNNING."""


def _milliseconds(time: float) -> int:
    return round(time * 1000)


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_KEY_CHARACTERS]
