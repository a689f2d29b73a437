"""Send runs to an MLflow tracking server or database through its client library.

A metric of MLflow is a row of key, step, time and value, and cannot be deleted. A database keeps identical rows once, a
folder of files keeps each. So rows that may have arrived before a kill are compared with those of the store, and a run
with void steps is deleted, which `mlflow runs restore` undoes, and replaced by another one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from engine.runs.folder import RunState
from engine.sync.description import MAX_TEXT_CHARACTERS, RunDescription
from engine.sync.remote import RemoteRun, Service, SyncError, first_line, without_credentials
from engine.sync.rows import Row
from engine.sync.state import RemoteState
from engine.utils.errors import UsageError, not_installed

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Metric
    from mlflow.tracking import MlflowClient

DEFAULT_EXPERIMENT = "gputrain"
# Limits of one request, of mlflow.utils.validation.
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_KEY_CHARACTERS = 250
TOKEN_TAG = "gputrain.sync"  # noqa: S105 - not a secret
# The client's own defaults wait for minutes: 7 attempts of up to 120 s, with pauses that double.
CLIENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    # The file store is a choice of whoever names a folder as tracking URI.
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
STATUSES = {RunState.FINISHED: "FINISHED", RunState.STOPPED: "KILLED"}
# A metric under `system/` with these names is on MLflow's page of system metrics.
SYSTEM_METRICS = {
    "util_percent": "utilization_percentage",
    "memory_used_bytes": "memory_usage_bytes",
    "power_watts": "power_usage_watts",
}


class MlflowStore(Service):
    """The experiment at a tracking URI. It is created if it does not exist."""

    name = "mlflow"

    def __init__(self, experiment: str | None) -> None:
        """Take URI and credentials from MLflow's own variables. Raises UsageError if there is no URI."""
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            # The library would create the database mlflow.db in the working folder.
            reason = (
                "is not set; name a server or a database, such as http://127.0.0.1:5000 or sqlite:////DIR/mlflow.db"
            )
            raise UsageError.one("MLFLOW_TRACKING_URI", reason, code="missing-value")
        if find_spec("mlflow") is None:
            raise UsageError.one("--service mlflow", not_installed("mlflow-skinny"), code="not-installed")
        self._uri = uri
        self._address = without_credentials(uri)
        self._experiment_name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT
        self.destination = f"{self._address} {self._experiment_name}"

    @cached_property
    def _client(self) -> MlflowClient:
        """Client of the library, which takes seconds to import."""
        for name, value in CLIENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        for library in ("mlflow", "alembic"):
            logging.getLogger(library).setLevel(logging.ERROR)
        return MlflowClient(tracking_uri=self._uri)

    def open(self, state: RemoteState, description: RunDescription, save: Callable[[], None]) -> RemoteRun:
        self._delete_void_run(state, save)
        run = self._find_run(state)
        if run is None:
            if state.run_id:
                # Someone has deleted it.
                state.restart(secrets.token_hex(8))
                save()
            run = self._create_run(state, description)
        state.run_id = run.info.run_id
        save()
        self._client.update_run(state.run_id, status="RUNNING")
        remote = MlflowRun(self._client, state, run.data.params)
        remote.location = self._run_location(run.info.run_id)
        remote.describe(description)
        return remote

    def _delete_void_run(self, state: RemoteState, save: Callable[[], None]) -> None:
        if not state.void:
            return
        run = self._find_run(state)
        if run is not None:
            self._client.set_tag(run.info.run_id, "gputrain.void", "a resume repeated steps of this run")
            self._client.delete_run(run.info.run_id)
        state.restart(secrets.token_hex(8))
        save()

    def _find_run(self, state: RemoteState) -> Any:
        """Return the remote run of a state, also if its ID is not stored yet; None if there is none."""
        from mlflow.exceptions import MlflowException

        if not state.run_id:
            found = self._client.search_runs(
                [self._experiment.experiment_id], f"tags.`{TOKEN_TAG}` = '{state.token}'", max_results=1
            )
            return found[0] if found else None
        try:
            run = self._client.get_run(state.run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _create_run(self, state: RemoteState, description: RunDescription) -> Any:
        return self._client.create_run(
            self._experiment.experiment_id,
            start_time=_milliseconds(description.started_at) if description.started_at is not None else None,
            tags={TOKEN_TAG: state.token, "mlflow.source.name": "gputrain", "mlflow.source.type": "LOCAL"},
            run_name=_value(description.name),
        )

    @cached_property
    def _experiment(self) -> Experiment:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            try:
                self._client.create_experiment(self._experiment_name)
            except MlflowException as error:
                # Another process may have created it at the same time.
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(self._experiment_name)
        assert experiment is not None  # noqa: S101 - it was created
        if experiment.lifecycle_stage != "active":
            raise SyncError(
                f"the experiment {self._experiment_name} at {self._address} was deleted; restore it, or select another "
                "with --experiment",
                code="run-deleted",
            )
        return experiment

    def close(self) -> None:
        """Nothing to do: the client keeps no connection that needs an end."""

    def _run_location(self, run_id: str) -> str:
        if self._address.startswith(("http://", "https://")):
            return f"{self._address.rstrip('/')}/#/experiments/{self._experiment.experiment_id}/runs/{run_id}"
        return f"{self._address} experiment {self._experiment_name} run {run_id}"

    def to_sync_error(self, error: Exception) -> SyncError:
        if isinstance(error, ModuleNotFoundError):
            return SyncError(f"{self._address} needs a library: {not_installed(str(error.name))}", code="not-installed")
        from mlflow.exceptions import MlflowException

        # The drivers of databases raise errors of their own.
        status: int | None = error.get_http_status_code() if isinstance(error, MlflowException) else None  # type: ignore[no-untyped-call]
        if status in (401, 403):
            return SyncError(
                f"MLflow at {self._address} refuses access (HTTP {status}); set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
                code="access-denied",
            )
        if _has_lost_connection(error):
            return SyncError(
                f"MLflow at {self._address} cannot be reached; start the server or correct MLFLOW_TRACKING_URI",
                temporary=True,
                code="connection-failed",
            )
        is_server_fault = status is not None and status >= 500
        return SyncError(
            f"MLflow at {self._address} failed: {self._reason(error)}", temporary=is_server_fault, code="service-failed"
        )

    def _reason(self, error: BaseException) -> str:
        return first_line(error).replace(self._uri, self._address)


class MlflowRun(RemoteRun):
    """A run of an experiment."""

    def __init__(self, client: MlflowClient, state: RemoteState, params: dict[str, str]) -> None:
        self.held_step = state.sent_step
        self._client = client
        self._run_id = state.run_id
        self._params = dict(params)
        # Rows up to this step may have arrived before a kill.
        self._unsure_until = state.intended_step
        self._known_rows: dict[str, set[tuple[int, int]]] = {}

    def describe(self, description: RunDescription) -> None:
        """Send name, params and tags.

        A param of MLflow cannot change. A value that a resume has changed becomes the tag `changed.section.key`.
        """
        from mlflow.entities import Param, RunTag

        config = {_key(key): _value(value) for key, value in description.flat_config().items()}
        new = [Param(key, value) for key, value in config.items() if key not in self._params]
        tags = {
            f"changed.{key}"[:MAX_KEY_CHARACTERS]: value
            for key, value in config.items()
            if key in self._params and self._params[key] != value
        }
        tags["gputrain.tags"] = ", ".join(description.tags)
        tags["mlflow.note.content"] = description.note
        tags["mlflow.runName"] = _value(description.name)
        for start in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + MAX_PARAMS])
        run_tags = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, len(run_tags), MAX_PARAMS):
            self._client.log_batch(self._run_id, tags=run_tags[start : start + MAX_PARAMS])
        self._params |= {param.key: param.value for param in new}

    def send(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_metric_key(name), value, _milliseconds(row.time), row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        metrics = [metric for metric in metrics if metric.step > self._unsure_until or not self._has(metric)]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])

    def _has(self, metric: Metric) -> bool:
        """Whether the store has a row of this metric, step and time."""
        if metric.key not in self._known_rows:
            history = self._client.get_metric_history(self._run_id, metric.key)
            self._known_rows[metric.key] = {(row.step, row.timestamp) for row in history}
        return (metric.step, metric.timestamp) in self._known_rows[metric.key]

    def finish(self, state: RunState, figures: Row, message: str) -> None:
        # Those of an earlier sync that was killed before it could store that it had finished.
        self._unsure_until = figures.step
        self._known_rows.clear()
        self.send([figures])
        self._client.set_tag(self._run_id, "gputrain.state", state.value)
        self._client.set_tag(self._run_id, "gputrain.message", _value(message))
        self._client.set_terminated(
            self._run_id, status=STATUSES.get(state, "FAILED"), end_time=_milliseconds(figures.time)
        )

    def leave(self) -> None:
        """Nothing to do: the status of a run that goes on remains RUNNING."""


def _milliseconds(time: float) -> int:
    return round(time * 1000)


def _key(name: str) -> str:
    """Return a name with only the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:MAX_KEY_CHARACTERS]


def _metric_key(name: str) -> str:
    prefix, _, reading = name.rpartition("/")
    if prefix.startswith("gpu/"):
        return f"system/{prefix.replace('/', '_')}_{SYSTEM_METRICS.get(reading, reading)}"
    return _key(name)


def _value(text: str) -> str:
    return text[:MAX_TEXT_CHARACTERS]


def _has_lost_connection(error: BaseException) -> bool:
    """Whether the cause of an error is a connection that failed or timed out."""
    import requests

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, requests.exceptions.ConnectionError | requests.exceptions.Timeout | ConnectionError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
