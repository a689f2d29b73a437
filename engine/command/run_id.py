"""The ID of one start of a command: `NAME-` and 32 hexadecimal digits, the marker of its processes.

Its second half is the inode of the run folder: the copy of a run folder has another inode and names no process, and a
run that was renamed has the same one.
"""

from __future__ import annotations

import secrets

from engine.runs.folder import RunFolder

HALF_DIGITS = 16


def make_run_id(folder: RunFolder) -> str:
    """Return a unique ID for a start of the command in a folder."""
    return f"{folder.name}-{secrets.token_hex(HALF_DIGITS // 2)}{_inode_digits(folder)}"


def last_run_id(folder: RunFolder) -> str | None:
    """Return the ID of the last start of the command in a folder; None if it was made for another folder, or if
    somebody else can change that."""
    command = folder.history().command if folder.is_own else None
    return command.run_id if command is not None and command.run_id.endswith(_inode_digits(folder)) else None


def _inode_digits(folder: RunFolder) -> str:
    return f"{folder.status().st_ino:0{HALF_DIGITS}x}"
