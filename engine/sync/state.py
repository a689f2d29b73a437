"""What was sent of a run: `RUN/sync/SERVICE.json`, one entry for each destination.

The entry names the remote run before it is created, and the last step of a batch before the batch is sent. So a sync
that was killed at any moment is continued in the same remote run, and knows which steps may have arrived.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from engine.runs.folder import RunFolder
from engine.utils.codec import ENTRIES, Count, FileRecord, Integer, Meta, Record, field, find_valid_fields, write_record
from engine.utils.errors import UsageError
from engine.utils.files import make_user_folder, shown_path, state_folder

MAX_STATE_BYTES = 1 << 20

ShortText = Annotated[str, Meta(max_length=4096)]


class RemoteState(Record, kw_only=True, frozen=False):  # type: ignore[misc]  # a sync changes it in place
    """State of one remote run."""

    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")]
    """Random name of the remote run: its ID at W&B, a tag of it at MLflow."""
    run_id: ShortText = ""
    """ID that MLflow gave to the remote run; "" before it is known."""
    location: ShortText = ""
    """URL or folder of the remote run."""
    sent_step: Count = 0
    """Last step that certainly arrived."""
    intended_step: Count = 0
    """Last step that may have arrived."""
    sessions: Count = 0
    """Number of resumes in the journal that the sent steps belong to."""
    journal_bytes: Integer = -1
    """Size of the journal when everything in it had arrived; -1 if this never was so."""
    ended: ShortText = ""
    """State of the run that the remote run shows; "" while it runs."""
    description: ShortText = ""
    """Digest of the name, config, tags and note that were sent."""
    void: Count = 0
    """1 if the remote run has steps that a resume voided, so that it must be replaced."""

    def restart(self, token: str | None = None) -> None:
        """Forget what was sent: the remote run is empty. A new `token` is the name of another remote run."""
        self.sent_step = self.intended_step = self.sessions = self.void = 0
        self.journal_bytes, self.ended, self.description = -1, "", ""
        if token is not None:
            self.token, self.run_id, self.location = token, "", ""


class _States(FileRecord, frozen=True, kw_only=True):
    """Content of the file: the state of each remote run by its destination."""

    remotes: Annotated[dict[str, RemoteState], ENTRIES] = field(default_factory=dict)


class StateFile:
    """The entries of one run and one service. Create it with `open_state`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # An entry without a valid token is dropped; other values that are not valid get their default.
        self._states = find_valid_fields(path, _States, MAX_STATE_BYTES) or _States()

    def read(self, destination: str) -> RemoteState:
        """Return the state of the remote run at a destination, a new one if there is none."""
        return self._states.remotes.get(destination) or RemoteState(token=secrets.token_hex(8))

    def write(self, destination: str, state: RemoteState) -> None:
        """Store the state of the remote run at a destination. Raises OSError."""
        self._states.remotes[destination] = state
        write_record(self._path, self._states)


@contextmanager
def open_state(folder: RunFolder, service: str) -> Iterator[StateFile]:
    """Yield the state of a run at a service, locked against other processes.

    The state of a foreign run is in the user's state folder. Raises UsageError if it cannot be written, or if another
    process syncs the run to this service.
    """
    try:
        home = _state_home(folder)
        handle = os.open(home / f"{service}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        path = shown_path(Path(str(error.filename or folder.path)))
        raise UsageError.one(str(path), f"cannot be written: {error.strerror}", code="not-writable") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError.one(
                folder.name, f"another `gputrain runs sync` sends this run to {service}", code="already-running"
            ) from error
        except OSError:
            # Not every network file system has locks.
            pass
        yield StateFile(home / f"{service}.json")
    finally:
        os.close(handle)


def _state_home(folder: RunFolder) -> Path:
    """Return the folder of the state, which is created with mode 0700. Raises OSError."""
    if folder.is_own:
        folder.sync.mkdir(mode=0o700, exist_ok=True)
        return folder.sync
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder.path))).hexdigest()[:16]
    return make_user_folder(state_folder(), f"sync/{digest}")
