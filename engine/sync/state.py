"""What was sent of a run: `RUN/sync/SERVICE.json`, one entry for each destination.

The entry is written after each batch, so a sync that was killed sends at most one batch again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated

from engine.runs.folder import RunFolder
from engine.utils.codec import ENTRIES, Count, FileRecord, Meta, Record, field, find_record, write_record
from engine.utils.files import make_user_folder, state_folder

MAX_STATE_BYTES = 1 << 20

ShortText = Annotated[str, Meta(max_length=4096)]


class RemoteState(Record, frozen=True, kw_only=True):
    """State of one remote run."""

    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,64}\Z")] = field(default_factory=lambda: secrets.token_hex(8))
    """Random name of the remote run: its ID at W&B, a tag of it at MLflow."""
    run_id: ShortText = ""
    """ID that MLflow gave to the remote run; "" before it is known."""
    location: ShortText = ""
    """URL or folder of the remote run."""
    sent_step: Count = 0
    """Last step that has arrived."""
    synced: ShortText = ""
    """Digest of the run when everything of it had arrived."""


class _States(FileRecord, frozen=True, kw_only=True):
    """Content of the file: the state of each remote run by its destination."""

    remotes: Annotated[dict[str, RemoteState], ENTRIES] = field(default_factory=dict)


def state_file(folder: RunFolder, service: str) -> Path:
    """Return the file with the state of a run, for a run of somebody else in the user's state folder.

    Raises OSError if its folder cannot be created."""
    if folder.is_own:
        folder.sync.mkdir(mode=0o700, exist_ok=True)
        return folder.sync / f"{service}.json"
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder.path))).hexdigest()[:16]
    return make_user_folder(state_folder(), f"sync/{digest}") / f"{service}.json"


def read_state(path: Path, destination: str) -> RemoteState:
    """Return the state of the remote run at a destination, a new one if there is none."""
    states = find_record(path, _States, MAX_STATE_BYTES) or _States()
    return states.remotes.get(destination) or RemoteState()


def write_state(path: Path, destination: str, state: RemoteState) -> None:
    """Store the state of the remote run at a destination. Raises OSError."""
    states = find_record(path, _States, MAX_STATE_BYTES) or _States()
    write_record(path, _States(remotes=states.remotes | {destination: state}))
