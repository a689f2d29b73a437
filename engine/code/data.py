"""A digest of the files that `gputrain run --data PATH -- COMMAND` names.

The digest covers names, sizes and modification times, because reading a data set of a terabyte would take hours. A
change that keeps size and time is not noticed, and a copy of the data counts as other data.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.utils.errors import UsageError
from engine.utils.text import printable

MAX_DATA_FILES = 5_000_000


def data_fingerprint(paths: Sequence[Path]) -> str:
    """Return the digest of files and of all files in folders; "" for no path. Links are not followed below a path.

    Raises UsageError if one does not exist or cannot be read."""
    if not paths:
        return ""
    digest, number = hashlib.sha256(), 0
    for path in paths:
        digest.update(os.fsencode(os.path.realpath(path)) + b"\0")
        try:
            for name, status in _files(path):
                number += 1
                if number > MAX_DATA_FILES:
                    reason = f"{printable(str(path))} has more than {MAX_DATA_FILES:,} files"
                    raise UsageError.one("--data", reason, "name fewer of them", code="too-many")
                facts = f"{stat.S_IFMT(status.st_mode)} {status.st_size} {status.st_mtime_ns}"
                digest.update(os.fsencode(name) + b"\0" + facts.encode() + b"\0")
        except OSError as error:
            place = printable(str(error.filename or path))
            raise UsageError.one("--data", f"{place} cannot be read: {error.strerror}", code="not-readable") from error
    return digest.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a path in the order of their names. Raises OSError."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        yield "", status
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(path / folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(name)
            else:
                yield name, entry.stat(follow_symlinks=False)
