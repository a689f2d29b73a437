"""Find the runs below a path, and follow all logs of one run.

A folder with logs is a run, named by its path relative to the one that was searched. Unprintable characters of a name
are escaped. Links are skipped, except that the path itself may be one. Nothing but a regular file is ever opened. The
readers of this package do the reading.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.foreign import csv_file, json_lines, mlflow_store, tensorboard, trackio, trainer_state, wandb_log
from engine.foreign.parameters import Parameters, read_parameters
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
MAX_LOGS = 50  # per folder
# A folder that was changed less than this before it was listed may change again without another modification time.
FRESH_SECONDS = 2.0
# Of these files, the content decides, or a folder beside them.
LATE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", ".db", ".yaml")
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
# A folder with both is a run of gputrain, which `engine.runs` reads.
OWN_FILES = frozenset({"events.jsonl", "owner.json"})


@dataclass(frozen=True)
class ForeignRun:
    """A run that another program recorded: its name, its folder, and its logs, the preferred one first.

    `key` tells it from all others: its folder, or the file that was searched. For one of several runs in a file, it is
    the file and the name in it, which is no path of a file.
    """

    name: str
    folder: Path
    logs: tuple[Log, ...]
    key: str

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of its logs, each once."""
        return tuple(dict.fromkeys(log.format for log in self.logs))

    def changed_at(self) -> float:
        """Return when one of its files was last written, in Unix seconds; 0 if all are gone."""
        return max((_modified_ns(path) for log in self.logs for path in log.files), default=0) / 1e9

    def read_parameters(self) -> Parameters:
        """Read the files with parameters beside its logs. They may be of another run if it shares its folder."""
        return {} if self.logs[0].run else read_parameters(self.folder)


@dataclass(frozen=True)
class FoundRuns:
    """The runs below a path, sorted by name. `is_partial` tells that some files, folders or runs were not read.

    `own` are the folders of runs of gputrain, which are not among `runs`.
    """

    runs: tuple[ForeignRun, ...]
    is_partial: bool = False
    own: frozenset[Path] = frozenset()


@dataclass(frozen=True)
class Limits:
    """How much of a tree is searched: folders, how deep they are nested, and runs."""

    depth: int = 12
    folders: int = 100_000
    runs: int = 10_000


def find_runs(path: Path, limits: Limits = Limits()) -> FoundRuns:
    """Find the runs in and below a folder, or the one of a file. A missing or inaccessible path has none."""
    return merge_runs(RunFinder(path, limits).search())


def merge_runs(parts: Iterable[FoundRuns]) -> FoundRuns:
    """Return the runs of several searches, each once."""
    runs, is_partial, own = dict[str, ForeignRun](), False, set[Path]()
    for part in parts:
        for run in part.runs:
            runs.setdefault(run.key, run)
        is_partial = is_partial or part.is_partial
        own |= part.own
    return FoundRuns(tuple(sorted(runs.values(), key=lambda run: run.name)), is_partial, frozenset(own))


class RunFinder:
    """Searches one path, again and again. A folder with a log is listed again when its modification time has changed:
    only then has it new files."""

    def __init__(self, path: Path, limits: Limits = Limits()) -> None:
        self._root = Path(os.path.realpath(path))
        self._limits = limits
        self._known: dict[Path, tuple[int, Listing, list[Log]]] = {}

    def search(self) -> Iterator[FoundRuns]:
        """Yield the runs of each folder, none for most."""
        root = self._root
        if not root.is_dir():
            if root.is_file():
                listing = Listing(root.parent, (root.name,), ())
                yield FoundRuns(tuple(_runs_in(listing, root.stem, _logs_in(listing), root)))
            return
        num_runs, num_folders = 0, 0
        pending = [(root, "", 0)]
        while pending:
            folder, name, depth = pending.pop()
            num_folders += 1
            if num_folders > self._limits.folders or num_runs >= self._limits.runs:
                yield FoundRuns((), is_partial=True)
                return
            listing, logs = self._list(folder)
            if OWN_FILES.issubset(listing.files):
                yield FoundRuns((), own=frozenset({folder}))
                continue
            runs = tuple(_runs_in(listing, name or root.name, logs, folder))[: self._limits.runs - num_runs]
            num_runs += len(runs)
            yield FoundRuns(runs, listing.is_partial)
            if depth == self._limits.depth:
                continue
            owned = SKIPPED_FOLDERS.union(*(log.owned_folders for log in logs))
            for inner in listing.folders:
                if inner not in owned and not inner.startswith("."):
                    pending.append((folder / inner, f"{name}/{inner}" if name else inner, depth + 1))

    def _list(self, folder: Path) -> tuple[Listing, list[Log]]:
        modified_ns = _modified_ns(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == modified_ns:
            return known[1:]
        listing = list_folder(folder)
        logs = [] if OWN_FILES.issubset(listing.files) else _logs_in(listing)
        # A database gets runs without a new file.
        is_final = not any(log.run for log in logs) if logs else not _may_get_log(listing)
        if is_final and time.time() - modified_ns / 1e9 > FRESH_SECONDS:
            self._known[folder] = modified_ns, listing, logs
        else:
            self._known.pop(folder, None)
        return listing, logs


def _may_get_log(listing: Listing) -> bool:
    """Whether a log may appear in an unchanged folder: a file gets its first line, or an inner folder a file."""
    return any(name.endswith(LATE_ENDINGS) for name in listing.files) or any(
        name.startswith("checkpoint-") for name in listing.folders
    )


def _logs_in(listing: Listing) -> list[Log]:
    return [log for find in FORMATS for log in find(listing)]


def _runs_in(listing: Listing, name: str, logs: list[Log], place: Path) -> Iterator[ForeignRun]:
    """Yield the run of a folder, and those that a log names. `place` is the folder, or its only file."""
    if own := [log for log in logs if not log.run][:MAX_LOGS]:
        yield ForeignRun(printable(name), listing.folder, tuple(own), str(place))
    for log in logs:
        if log.run:
            yield ForeignRun(printable(f"{name}/{log.run}"), listing.folder, (log,), f"{log.files[0]}/{log.run}")


def _modified_ns(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns  # noqa: PTH116 - a Path takes longer
    except OSError:
        return 0


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
            if len(self._sources) > 1:
                reading.points = [point for point in reading.points if owners.setdefault(point.name, index) == index]
            readings.append(reading)
        return readings
