"""What this user can do without: caches, and the reservations of dead runs. Called by `gputrain clean`.

No live run depends on it: what a process has open stays readable, and a file that a process has locked is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.base.codec import Count, Record
from engine.base.files import cache_folder, file_size, is_locked, user_path_problem
from engine.gpus.reservation_reader import dead_reservations, read_reservations


class Leftover(Record, frozen=True):
    """Files of one kind: where they are, how many, and their size in bytes."""

    place: str
    files: Count
    size_bytes: Count


def find_leftovers() -> list[Leftover]:
    """Return the caches, by folder or by the beginning of their names, and the reservations of dead runs."""
    groups: dict[str, list[Path]] = {}
    for path in _cached_files():
        parts = path.relative_to(cache_folder()).parts
        group = parts[0] if len(parts) > 1 else f"{path.stem.partition('-')[0]}*"
        groups.setdefault(str(cache_folder() / group), []).append(path)
    for lock in dead_reservations():
        files = filter(os.path.lexists, (lock, lock.with_suffix(".json")))
        groups.setdefault(f"{lock.parent} (dead runs)", []).extend(files)
    return [Leftover(place, len(paths), sum(map(file_size, paths))) for place, paths in sorted(groups.items())]


def remove_leftovers() -> None:
    """Remove what `find_leftovers` finds now. Raises OSError if a cache cannot be removed."""
    for path in _cached_files():
        path.unlink(missing_ok=True)
    for folder, _, _ in os.walk(cache_folder(), topdown=False):
        # A process may have made a file in it in the meantime.
        with suppress(OSError):
            Path(folder).rmdir()
    read_reservations(remove_stale=True)


def _cached_files() -> Iterator[Path]:
    """Yield the files of this user's cache that no process has locked."""
    if user_path_problem(cache_folder()) is not None:
        return
    for folder, _, names in os.walk(cache_folder()):
        yield from (path for name in names if not _is_held(path := Path(folder, name)))


def _is_held(path: Path) -> bool:
    try:
        return path.suffix == ".lock" and is_locked(path)
    except OSError:
        return False
