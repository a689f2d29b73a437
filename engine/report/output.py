"""Write a page or a figure, and never over a file that somebody else made."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from engine.utils.errors import UsageError
from engine.utils.files import is_folder, open_regular_file, replace_file, shown_path

# A file has its mark in this many bytes of its beginning or its end.
MARKED_BYTES = 1 << 16


def make_mark(kind: str, names: Sequence[str]) -> str:
    """Return the text that marks a file as the page or the figure of these runs, in any format."""
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"gputrain {kind} {digest}"


def check_output(path: Path, mark: str, *, force: bool) -> None:
    """Raise UsageError if a file must not be written: it exists and has another mark, unless `force`."""
    if is_folder(path):
        raise UsageError.one(
            str(path), "is a folder", f"name a file in it, such as {path / 'report.html'}", code="not-a-file"
        )
    if os.path.lexists(path) and not force and not _has_mark(path, mark):
        reason = "exists and was not made from these runs"
        raise UsageError.one(str(path), reason, "set another -o, or overwrite it with --force", code="name-in-use")
    if not is_folder(path.parent):
        raise UsageError.one(
            str(path.parent), "there is no such folder", "create it first, or set another -o", code="not-found"
        )


def write_output(path: Path, data: bytes, mark: str, *, force: bool) -> Path:
    """Write a file atomically, and return its path. Raises UsageError as `check_output` does, and if writing fails."""
    check_output(path, mark, force=force)
    try:
        replace_file(path, lambda file: file.write(data))
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be written: {error.strerror or error}", code="not-writable") from error
    return shown_path(path)


def _has_mark(path: Path, mark: str) -> bool:
    try:
        with open_regular_file(path) as file:
            head = file.read(MARKED_BYTES)
            file.seek(max(file.seek(0, 2) - MARKED_BYTES, 0))
            return mark.encode() in head + file.read()
    except OSError:
        return False
