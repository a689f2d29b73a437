"""Write a page or a figure, and never over a file that `gputrain report` did not make."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.utils import output_file
from engine.utils.errors import UsageError
from engine.utils.files import read_bytes, replace_file

MARK = "made by gputrain report, which may replace it"
"""What a page and the metadata of a figure in any format say of their origin."""
MAX_REPORT_BYTES = 1 << 28


def check_output(path: Path, *, force: bool) -> None:
    """Raise UsageError if a file must not be written: `gputrain report` did not make it, unless `force`."""
    with suppress(OSError):
        force = force or MARK.encode() in read_bytes(path, MAX_REPORT_BYTES)
    output_file.check_output(path, "report.html", force=force, although=" and is no report")


def write_output(path: Path, data: bytes, *, force: bool) -> Path:
    """Write a file atomically, and return its path. Raises UsageError as `check_output` does, and if writing fails."""
    check_output(path, force=force)
    try:
        replace_file(path, lambda file: file.write(data))
    except OSError as error:
        raise UsageError.one(str(path), f"cannot be written: {error.strerror or error}", code="not-writable") from error
    return path
