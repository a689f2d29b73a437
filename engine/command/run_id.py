"""The ID of one start of a command: `NAME-` and 32 hexadecimal digits, the marker of its processes.

Everybody who can read the journal of a run can read its ID, and somebody else may send a run folder with that ID. So
its second half is a digest that only this user can make, of the first half and the inode of the folder: the copy of a
run folder has another inode, and a run that was renamed has the same one.
"""

from __future__ import annotations

import re
import secrets

from engine.command.user_key import is_digest_of, keyed_digest
from engine.runs.folder import RunFolder
from engine.utils.files import shown_path

HALF_DIGITS = 16
_RUN_ID = re.compile(rf".*-([0-9a-f]{{{HALF_DIGITS}}})([0-9a-f]{{{HALF_DIGITS}}})", re.DOTALL)


def make_run_id(folder: RunFolder) -> str:
    """Return a unique ID for a start of the command in a folder.

    If the key of this user cannot be written, the ID is random, and names no process once its supervisor has ended.
    """
    nonce = secrets.token_hex(HALF_DIGITS // 2)
    try:
        digest = keyed_digest(_signed_value(folder, nonce))[:HALF_DIGITS]
    except OSError:
        digest = secrets.token_hex(HALF_DIGITS // 2)
    return f"{shown_path(folder.root).name}-{nonce}{digest}"


def last_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of the command in a folder; None unless this user has made it for this folder,
    and nobody else can change that."""
    command = folder.history().command if folder.is_own else None
    return command.run_id if command is not None and _is_made_for(folder, command.run_id) else None


def _is_made_for(folder: RunFolder, run_id: str) -> bool:
    found = _RUN_ID.fullmatch(run_id)
    try:
        return found is not None and is_digest_of(found[2], _signed_value(folder, found[1]), num_digits=HALF_DIGITS)
    except OSError:
        return False


def _signed_value(folder: RunFolder, nonce: str) -> tuple[str, str, int, int]:
    status = folder.status()
    # The name tells it from other values that have digests with the same key. The snapshot of a file system has the
    # same inodes on another device.
    return "run_id", nonce, status.st_dev, status.st_ino
