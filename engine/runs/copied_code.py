"""The files that a run has made in its copy of the code. They exist nowhere else, so they are named before a run is
deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.runs.folder import CODE_COPY, CODE_RECORD, RunFolder

MAX_SEARCHED_FILES = 300_000
MAX_MADE_FILES = 1000


def made_files(path: Path) -> list[str]:
    """Return the files that a run has made or changed in its copy, at most 1000, the newest first.

    They are newer than the record of the code, which is written once the copy is complete: its times and theirs are
    those of one file system. Links are not followed."""
    folder = RunFolder(path).code
    try:
        copied_ns = os.lstat(folder / CODE_RECORD).st_ctime_ns
    except OSError:
        return []
    made: list[tuple[int, str]] = []
    for (name, status), _ in zip(_files(folder / CODE_COPY), range(MAX_SEARCHED_FILES), strict=False):
        if status.st_ctime_ns > copied_ns:
            made.append((status.st_ctime_ns, name))
    return [name for _, name in sorted(made, reverse=True)[:MAX_MADE_FILES]]


def _files(copy: Path) -> Iterator[tuple[str, os.stat_result]]:
    for folder, folders, names in os.walk(copy):
        folders[:] = [each for each in folders if each != "__pycache__"]
        for name in names:
            with suppress(OSError):
                path = f"{folder}/{name}"
                yield os.path.relpath(path, copy), os.lstat(path)
