"""Write a page or a figure, and never over a file that somebody else made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from engine.utils import output_file
from engine.utils.errors import UsageError
from engine.utils.files import open_regular_file, replace_file, shown_path

# A file has its mark in this many bytes of its beginning or its end.
MARKED_BYTES = 1 << 16


def make_mark(kind: str, names: Sequence[str]) -> str:
    """Return the text that marks a file as the page or the figure of these runs, in any format."""
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:16]
    return f"gputrain {kind} {digest}"


def check_output(path: Path, mark: str, *, force: bool) -> None:
    """Raise UsageError if a file must not be written: it exists and has another mark, unless `force`."""
    force = force or _has_mark(path, mark)
    output_file.check_output(path, "report.html", force=force, although=" and was not made from these runs")


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
