"""A request that was sent to a live run, and what the run has done about it since."""

from __future__ import annotations

from typing import Any

from engine.base.files import file_size
from engine.runs.control import RequestName, send_request
from engine.runs.events import CheckpointSaved, ControlEvent, Event, Profiled, RunContinued, RunPaused, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import JournalReader
from engine.runs.run_row import open_run

ANSWERS = (CheckpointSaved, ControlEvent, Profiled, RunContinued, RunPaused, WarningEvent)


class SentRequest:
    """A request to a run. `row` is that of the run at the last `poll`, at first when it was sent.

    `events` are those of `ANSWERS` that the run has had since it received the request, beginning with that."""

    def __init__(self, folder: RunFolder, request: RequestName, **values: Any) -> None:
        """Send the request; `values` are those of `send_request`. Raises UsageError if this user may not control the
        run."""
        self.folder, self.request = folder, request
        self.row = open_run(folder)
        self.events: list[Event] = []
        self._journal = JournalReader(folder.journal)
        self._journal.offset = file_size(folder.journal)
        send_request(folder.control, request, **values)

    @property
    def was_received(self) -> bool:
        return bool(self.events)

    def poll(self) -> None:
        """Update row and events."""
        # The last events of a run that has ended are in its journal.
        self.row = open_run(self.folder)
        for event in self._journal.poll(kinds=ANSWERS):
            is_receipt = isinstance(event, ControlEvent) and event.request == self.request
            if self.was_received or is_receipt or isinstance(event, Profiled):
                self.events.append(event)

    def has_answered(self, kind: type[Event]) -> bool:
        """Return whether the run has had an event of this type since it received the request."""
        return any(isinstance(event, kind) for event in self.events)

    def find_later(self, request: RequestName) -> ControlEvent | None:
        """Return the receipt of another request that came after this one; None if there was none."""
        receipts = (event for event in self.events if isinstance(event, ControlEvent))
        return next((event for event in receipts if event.request == request), None)
