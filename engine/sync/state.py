"""What was sent of a run: `RUN/sync/SERVICE.json`, one entry for each destination.

The entry names the remote run before it is created, and the last step of a batch before the batch is sent. So a sync
that was killed at any moment is continued in the same remote run, and knows which steps may have arrived.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.files import make_user_folder, read_json, shown_path, state_folder, write_json

STATE_FORMAT = 1
MAX_STATE_BYTES = 1 << 20
MAX_TEXT_CHARACTERS = 4096
TOKEN_PATTERN = r"[0-9a-f]{8,64}"  # noqa: S105 - not a secret


@dataclass
class RemoteState:
    """State of one remote run."""

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random name of the remote run: its ID at W&B, a tag of it at MLflow."""
    run_id: str = ""
    """ID that MLflow gave to the remote run; "" before it is known."""
    location: str = ""
    """URL or folder of the remote run."""
    sent_step: int = 0
    """Last step that certainly arrived."""
    intended_step: int = 0
    """Last step that may have arrived."""
    sessions: int = 0
    """Number of resumes in the journal that the sent steps belong to."""
    journal_bytes: int = -1
    """Size of the journal when everything in it had arrived; -1 if this never was so."""
    ended: str = ""
    """State of the run that the remote run shows; "" while it runs."""
    description: str = ""
    """Digest of the name, config, tags and note that were sent."""
    void: int = 0
    """1 if the remote run has steps that a resume voided, so that it must be replaced."""

    def restart(self, token: str | None = None) -> None:
        """Forget what was sent: the remote run is empty. A new `token` is the name of another remote run."""
        self.sent_step = self.intended_step = self.sessions = self.void = 0
        self.journal_bytes, self.ended, self.description = -1, "", ""
        if token is not None:
            self.token, self.run_id, self.location = token, "", ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RemoteState | None:
        """Parse an entry; None if it has no valid token. Other values that are missing or invalid get their default."""
        known: dict[str, Any] = {}
        for part in fields(cls):
            value = values.get(part.name)
            if type(value) is int if part.type == "int" else _is_short_text(value):
                known[part.name] = value
        token = known.get("token", "")
        return cls(**known) if re.fullmatch(TOKEN_PATTERN, token) else None


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS


class StateFile:
    """The entries of one run and one service. Create it with `open_state`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        stored = read_json(path, MAX_STATE_BYTES) or {}
        remotes = stored.get("remotes")
        self._remotes: dict[str, Any] = remotes if isinstance(remotes, dict) else {}

    def read(self, destination: str) -> RemoteState:
        """Return the state of the remote run at a destination, a new one if there is none."""
        entry = self._remotes.get(destination)
        return (RemoteState.from_dict(entry) if isinstance(entry, dict) else None) or RemoteState()

    def write(self, destination: str, state: RemoteState) -> None:
        """Store the state of the remote run at a destination. Raises OSError."""
        self._remotes[destination] = asdict(state)
        write_json(self._path, {"format": STATE_FORMAT, "remotes": self._remotes})


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
                folder.name, f"another `gputrain sync` sends this run to {service}", code="already-running"
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
