"""Copy a run to a service: read its journal, send the steps that are new, end the remote run when the run has ended.

`gputrain runs sync` calls it; `engine.sync.mlflow_store` and `engine.sync.wandb_service` are the services. Each step is
sent at least once. If a resume repeats steps that were sent, another remote run gets all steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.config.schema import without_unstored
from engine.config.yaml_io import MAX_CONFIG_BYTES
from engine.runs.events import RunResumed, RunStarted
from engine.runs.folder import RunFolder, RunState
from engine.runs.journal import JournalReader
from engine.runs.labels import read_labels
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import own_metrics, recorded_metrics
from engine.runs.record_completion import open_run
from engine.runs.run_config import read_stored_config
from engine.runs.run_record import RunRecord
from engine.sync.rows import Row, batches, read_rows
from engine.sync.state import RemoteState, read_state, state_file, write_state
from engine.utils.codec import replace
from engine.utils.errors import CodedError
from engine.utils.files import file_size

# The state is written after each batch.
BATCH_ROWS = 500
MAX_TEXT_CHARACTERS = 6000
MAX_REASON_CHARACTERS = 300
# Addresses of services, which contain passwords, belong to the user and not to the run.
PRIVATE_SECTION = "notify"
RUN_FACTS = ("host", "world_size", "backend", "global_batch", "train_images", "val_images", "classes", "parameters")


class SyncError(CodedError):
    """A service cannot be used. The message is one sentence."""

    code = "service-failed"


class RemoteRun(Protocol):
    """The copy of one run at a service. Its methods raise the errors of the library."""

    state: RemoteState
    """State with the ID and the location of the remote run."""
    held_step: int
    """Rows up to this step are at the service."""

    def send(self, rows: list[Row]) -> None:
        """Send rows, which follow each other."""

    def finish(self, state: RunState, figures: Row, message: str) -> None:
        """Record how the run ended, its final figures and the message of its end."""

    def leave(self) -> None:
        """Stop sending to a run that goes on."""


class Service(Protocol):
    """A service that runs are copied to, with the project or experiment that they get into."""

    name: str
    """Value of `--service`."""
    destination: str
    """Which service, project or experiment, without credentials. A run has one remote run at each destination."""

    def open(self, state: RemoteState, description: RunDescription) -> RemoteRun:
        """Create the remote run, or continue the one in `state`, and send its description."""

    def void(self, state: RemoteState) -> None:
        """Mark a remote run whose steps a resume has repeated."""

    def advice(self) -> str:
        """Return what helps if the service cannot be used."""


@dataclass(frozen=True)
class RunDescription:
    """Name, config and labels of a run. `config` has the values of `config.yaml` by section and facts of its start."""

    name: str
    config: Mapping[str, Mapping[str, Any]]
    tags: tuple[str, ...]
    note: str
    started_at: float | None

    def flat_config(self) -> dict[str, str]:
        """Return the config as text by `section.key`. Unset keys are skipped."""
        return {
            f"{section}.{key}": as_text(value)
            for section, keys in self.config.items()
            for key, value in keys.items()
            if value is not None
        }


def describe_run(folder: RunFolder, start: RunStarted | None) -> RunDescription:
    """Return the description of a run from its folder and the first start in its journal."""
    stored = read_stored_config(folder.config, MAX_CONFIG_BYTES) or {}
    sections = {
        str(section): {str(key): _bounded(value) for key, value in keys.items()}
        for section, keys in stored.items()
        if isinstance(keys, dict) and section != PRIVATE_SECTION
    }
    config = without_unstored(sections)
    if start is not None:
        config["started"] = {name: _bounded(getattr(start, name)) for name in RUN_FACTS}
    labels = read_labels(folder)
    return RunDescription(folder.name, config, labels.tags, labels.note, start.time if start is not None else None)


def as_text(value: Any) -> str:
    """Return a value of a config as text of limited size."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode(errors="replace").decode()[:MAX_TEXT_CHARACTERS]


def _bounded(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else as_text(value)


class RunSync:
    """Copies one run. Call `poll` until it returns True, then `close`."""

    def __init__(self, folder: RunFolder, service: Service) -> None:
        """Read what was sent before. Raises OSError if it could not be stored."""
        self.folder, self._service = folder, service
        self._path = state_file(folder, service.name)
        self.state = read_state(self._path, service.destination)
        self.run_state = RunState.STARTING
        self.steps_sent = 0
        """Number of rows that this process has sent."""
        self._remote: RemoteRun | None = None
        self._sent = (-1, "", "")
        """Size of the journal, digest of the description and state of the run that were sent."""

    def poll(self) -> bool:
        """Send what is new. Return whether the run has ended and its remote run is complete.

        Raises SyncError; the next call then continues with what the remote run has."""
        # First the state and then the journal: that of an ended run is complete.
        record, self.run_state = open_run(self.folder)
        ended, size = not self.run_state.live, file_size(self.folder.journal)
        if size == 0 or (record.ranks is None and not ended):
            return ended
        description = repr(describe_run(self.folder, None)).encode(errors="replace")
        found = (size, hashlib.sha256(description).hexdigest()[:16], self.run_state.value if ended else "")
        if found not in (self._sent, (self.state.journal_bytes, self.state.description, self.state.ended)):
            if self._sent[1] != found[1]:
                self.close()
            self._use(lambda: self._send(record, ended=ended))
            self._sent = found
            self._save(description=found[1], ended=found[2])
            if ended:
                self._save(journal_bytes=size)
        return ended

    def close(self) -> None:
        """End sending to a run that goes on. Raises SyncError."""
        remote, self._remote = self._remote, None
        if remote is not None:
            self._use(remote.leave)
            # Not earlier: a library may keep rows in memory.
            self._save(journal_bytes=self._sent[0])

    def _send(self, record: RunRecord, *, ended: bool) -> None:
        starts = [event for event in JournalReader(self.folder.journal).poll() if isinstance(event, RunStarted)]
        resumed_from = [event.from_step for event in starts if isinstance(event, RunResumed)]
        if any(step < self.state.sent_step for step in resumed_from[self.state.sessions :]):
            self.close()
            self._service.void(self.state)
            self.state = RemoteState()
        if self._remote is None:
            # A sync that is killed while it creates the remote run finds it again by its token.
            self._save()
            description = describe_run(self.folder, next(iter(starts), None))
            self._remote = self._service.open(self.state, description)
            self.state = self._remote.state
            self._save(sent_step=self._remote.held_step)
        remote, step = self._remote, self.state.sent_step
        rows = read_rows(JournalReader(self.folder.journal).poll(), resumed_from, ended=ended)
        for batch in batches((row for row in rows if row.step > remote.held_step), BATCH_ROWS):
            remote.send(batch)
            step = remote.held_step = batch[-1].step
            self.steps_sent += len(batch)
            self._save(sent_step=step, sessions=len(resumed_from))
        if ended:
            directions = read_directions(self.folder.path.parent)
            figures = ((each.key, each.of_run(record)) for each in recorded_metrics(own_metrics([record], directions)))
            values = {f"summary/{key}": float(value) for key, value in figures if value is not None}
            remote.finish(self.run_state, Row(max(step, 1), record.updated_at or 0.0, values), record.message)
            self._remote = None

    def _use(self, use: Callable[[], None]) -> None:
        """Call the library of the service. Raises SyncError."""
        try:
            use()
        except SyncError:
            raise
        except Exception as error:
            self._remote = None
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON_CHARACTERS]
            place = self._service.destination
            raise SyncError(f"{place} cannot be used: {without_credentials(line)}; {self._service.advice()}") from error

    def _save(self, **changes: str | int) -> None:
        self.state = replace(self.state, **changes)
        try:
            write_state(self._path, self._service.destination, self.state)
        except OSError as error:
            # Without it, the next sync would send the same steps again.
            reason = f"{self.folder.name}: its sync state cannot be written: {error.strerror}"
            raise SyncError(reason, "not-writable") from error


def without_credentials(text: str) -> str:
    """Return a text whose URIs have no user, password, query and fragment, which may be secrets."""
    text = re.sub(r"(?<=://)[^\s/]*@", "", text)
    return re.sub(r"(://[^\s?#]*)[?#]\S*", r"\1", text)
