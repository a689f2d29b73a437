"""Copy a run to a service: read its journal, send the steps that are new, end the remote run when the run has ended.

`gputrain runs sync` calls it; `engine.report.sync.mlflow_store` and `engine.report.sync.wandb_service` are the
services. Each step is sent at least once, and once unless a sync is killed.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from engine.base.errors import CodedError
from engine.base.files import file_size
from engine.config.schema import UNSTORED_KEYS
from engine.report.sync.rows import Row, batches, read_rows
from engine.runs.events import RunResumed, RunStarted
from engine.runs.folder import RunFolder, RunState
from engine.runs.journal import JournalReader
from engine.runs.labels import RunLabels, read_labels
from engine.runs.metric_directions import read_directions
from engine.runs.metrics import figures_of
from engine.runs.run_row import RunRow, open_run

# After a kill, the last batch may be sent again.
BATCH_ROWS = 500
MAX_TEXT_CHARACTERS = 6000
MAX_REASON_CHARACTERS = 300
# Addresses of services, which contain passwords, belong to the user and not to the run.
PRIVATE_SECTION = "notify."
RUN_FACTS = ("host", "world_size", "backend", "global_batch", "train_images", "val_images", "classes", "parameters")


class SyncError(CodedError):
    """A service cannot be used. The message is one sentence."""

    code = "service-failed"


class RunSync(ABC):
    """Copies one run to one service. Call `poll` until it returns True, then `close`.

    A subclass is a service. Its methods raise the errors of the library. The remote run itself says which steps it has;
    nothing is stored here.
    """

    advice: ClassVar[str]
    """What helps if the service cannot be used."""

    def __init__(self, folder: RunFolder, destination: str) -> None:
        """`destination` is the service with its project or experiment, without credentials. A run has one remote run at
        each destination."""
        self.folder, self.destination = folder, destination
        self.location = ""
        """URL or folder of the remote run, "" before it is open."""
        self.sent_step = 0
        """Last step that the remote run has."""
        self.run_state: str = RunState.STARTING
        self.complete = False
        """Whether the run has ended, and everything of it is at the service."""
        self.steps_sent = 0
        """Number of rows that this process has sent."""
        self._is_open = False
        self._described = self._sent = ""
        """The config and the labels, and the state of the run, that were sent."""

    @abstractmethod
    def open(self, token: str, config: Mapping[str, Any], labels: RunLabels, started_at: float | None) -> None:
        """Create the remote run that `token` names, or continue it, and send its description. Sets `location` and
        `sent_step`."""

    @abstractmethod
    def send(self, rows: list[Row]) -> None:
        """Send rows, which follow each other."""

    @abstractmethod
    def finish(self, figures: Row, message: str) -> None:
        """Record how the run ended, its final figures and the message of its end."""

    @abstractmethod
    def leave(self) -> None:
        """Stop sending to a run that goes on."""

    def poll(self) -> bool:
        """Send what is new. Return whether the run has ended and its remote run is complete.

        Raises SyncError; the next call then continues with what the remote run has."""
        # First the state and then the journal: that of an ended run is complete.
        row = open_run(self.folder)
        self.run_state = row.state
        ended, size = not row.live, file_size(self.folder.journal)
        if size == 0 or (row.record.values.get("ranks") is None and not ended):
            return ended
        described = repr((row.record.config, read_labels(self.folder)))
        if (found := repr((size, described, self.run_state))) != self._sent:
            if described != self._described:
                # The description is sent when the remote run is opened.
                self.close()
            self._described = described
            self._use(lambda: self._send(row, ended=ended))
            self._sent = found
        self.complete = ended
        return ended

    def close(self) -> None:
        """End sending to a run that goes on. Raises SyncError."""
        if self._is_open:
            self._is_open = False
            self._use(self.leave)

    def _send(self, row: RunRow, *, ended: bool) -> None:
        if not self._is_open:
            self._open(row)
        resumes = JournalReader(self.folder.journal).poll(kinds=(RunResumed,))
        resumed_from = [event.from_step for event in resumes if isinstance(event, RunResumed)]
        rows = read_rows(JournalReader(self.folder.journal).poll(), resumed_from, ended=ended)
        # Neither service can replace steps, so those that a resume repeats remain as they were sent.
        for batch in batches((row for row in rows if row.step > self.sent_step), BATCH_ROWS):
            self.send(batch)
            self.steps_sent += len(batch)
            self.sent_step = batch[-1].step
        if ended:
            directions = read_directions(self.folder.path.parent)
            values = {f"summary/{metric.key}": float(value) for metric, value in figures_of(row.record, directions)}
            self.finish(Row(max(self.sent_step, 1), row.record.updated_at or 0.0, values), row.record.message)
            self._is_open = False

    def _open(self, row: RunRow) -> None:
        shown = {
            key: _bounded(value)
            for key, value in (row.config or {}).items()
            if value is not None and key not in UNSTORED_KEYS and not key.startswith(PRIVATE_SECTION)
        }
        first, started_at = next(JournalReader(self.folder.journal).poll(), None), None
        for started in JournalReader(self.folder.journal).poll(kinds=(RunStarted,)):
            started_at = started.time
            shown |= {f"started.{name}": _bounded(getattr(started, name)) for name in RUN_FACTS}
            break
        # The first event of a run never changes, and a sync that was killed finds the remote run again by it.
        token = hashlib.sha256(repr(first).encode(errors="replace")).hexdigest()[:16]
        self.open(token, shown, read_labels(self.folder), started_at)
        self._is_open = True

    def _use(self, use: Callable[[], None]) -> None:
        """Call the library of the service. Raises SyncError."""
        try:
            use()
        except Exception as error:
            self._is_open = False
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:MAX_REASON_CHARACTERS]
            reason = f"{self.destination} cannot be used: {without_credentials(line)}; {self.advice}"
            raise SyncError(reason) from error


def as_text(value: Any) -> str:
    """Return a value of a config as text of limited size."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode(errors="replace").decode()[:MAX_TEXT_CHARACTERS]


def _bounded(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else as_text(value)


def without_credentials(text: str) -> str:
    """Return a text whose URIs have no user, password, query and fragment, which may be secrets."""
    text = re.sub(r"(?<=://)[^\s/]*@", "", text)
    return re.sub(r"(://[^\s?#]*)[?#]\S*", r"\1", text)
