"""Find the runs below a path, and follow all logs of one run.

A folder with logs is a run, named by its path relative to the one that was searched. Unprintable characters of a name
are escaped. Links are skipped, except that the path itself may be one. Nothing but a regular file is ever opened. The
readers of this package do the reading.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.foreign import csv_file, json_lines, mlflow_store, tensorboard, trackio, trainer_state, wandb_log
from engine.foreign.reading import POLL_BYTES, Listing, Log, Reading, list_folder
from engine.utils.text import printable

# If two formats have the same metric, the first one in this order counts: those with a time for each value come first.
FORMATS = (
    tensorboard.find,
    wandb_log.find,
    trackio.find,
    mlflow_store.find,
    trainer_state.find,
    json_lines.find,
    csv_file.find,
)
MAX_DEPTH = 12
MAX_RUNS = 10_000
MAX_FOLDERS = 100_000
MAX_LOGS = 50  # per folder
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
# A folder with both is a run of gputrain, which `engine.runs` reads.
OWN_FILES = frozenset({"events.jsonl", "owner.json"})


@dataclass(frozen=True)
class ForeignRun:
    """A run that another program recorded: its name, its folder, and its logs, the preferred one first."""

    name: str
    folder: Path
    logs: tuple[Log, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of its logs, each once."""
        return tuple(dict.fromkeys(log.format for log in self.logs))

    def changed_at(self) -> float:
        """Return when one of its files was last written, in Unix seconds; 0 if all are gone."""
        return max((_modified(path) for log in self.logs for path in log.files), default=0.0)


@dataclass(frozen=True)
class FoundRuns:
    """The runs below a path, sorted by name. `is_partial` tells that some files, folders or runs were not read."""

    runs: tuple[ForeignRun, ...]
    is_partial: bool = False


def find_runs(path: Path) -> FoundRuns:
    """Find the runs in and below a folder, or the one of a file. A missing or inaccessible path has none."""
    root = Path(os.path.realpath(path))
    if not root.is_dir():
        if not root.is_file():
            return FoundRuns(())
        listing = Listing(root.parent, (root.name,), ())
        return FoundRuns(tuple(_runs_in(listing, root.stem, _logs_in(listing))))
    runs: list[ForeignRun] = []
    pending, num_folders, is_partial = [(root, "", 0)], 0, False
    while pending:
        folder, name, depth = pending.pop()
        num_folders += 1
        if num_folders > MAX_FOLDERS or len(runs) >= MAX_RUNS:
            return FoundRuns(_sorted(runs)[:MAX_RUNS], is_partial=True)
        listing = list_folder(folder)
        is_partial = is_partial or listing.is_partial
        if OWN_FILES.issubset(listing.files):
            continue
        logs = _logs_in(listing)
        runs += _runs_in(listing, name or root.name, logs)
        if depth == MAX_DEPTH:
            continue
        owned = SKIPPED_FOLDERS.union(*(log.owned_folders for log in logs))
        for inner in listing.folders:
            if inner not in owned and not inner.startswith("."):
                pending.append((folder / inner, f"{name}/{inner}" if name else inner, depth + 1))
    return FoundRuns(_sorted(runs), is_partial)


def _logs_in(listing: Listing) -> list[Log]:
    return [log for find in FORMATS for log in find(listing)]


def _runs_in(listing: Listing, name: str, logs: list[Log]) -> Iterator[ForeignRun]:
    """Yield the run of a folder, and those that a log names."""
    if own := [log for log in logs if not log.run][:MAX_LOGS]:
        yield ForeignRun(printable(name), listing.folder, tuple(own))
    for log in logs:
        if log.run:
            yield ForeignRun(printable(f"{name}/{log.run}"), listing.folder, (log,))


def _sorted(runs: list[ForeignRun]) -> tuple[ForeignRun, ...]:
    return tuple(sorted(runs, key=lambda run: run.name))


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


class RunFollower:
    """Follows all logs of a run. If two of them have a metric of the same name, the preferred log's points count."""

    def __init__(self, run: ForeignRun) -> None:
        self._sources = [log.open() for log in run.logs]
        self._owners: dict[str, int] = {}

    def poll(self, max_bytes: int = POLL_BYTES) -> list[Reading]:
        """Return a reading for each log, in their order. All together read at most about `max_bytes`.

        `drop_from` of a reading concerns the points of the same log.
        """
        readings = []
        for index, source in enumerate(self._sources):
            reading = source.poll(max_bytes // len(self._sources))
            owners = self._owners
            reading.points = [point for point in reading.points if owners.setdefault(point.name, index) == index]
            readings.append(reading)
        return readings
