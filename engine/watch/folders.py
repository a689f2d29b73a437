"""Find the runs below a path, and follow all logs of one run.

A folder with logs is a run, named by its path relative to the one that was searched. Unprintable characters of a name
are escaped. Links are skipped, except that the path itself may be one. Nothing but a regular file is ever opened. The
readers of this package do the reading.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from engine.base.errors import UsageError
from engine.base.files import is_file, is_folder
from engine.base.text import printable
from engine.watch import (
    mlflow_database,
    mlflow_store,
    row_files,
    tensorboard,
    text_log,
    trackio,
    trainer_state,
    wandb_log,
)
from engine.watch.parameters import Parameters, read_parameters
from engine.watch.reading import NO_CHOICE, POLL_BYTES, UNREAD, ColumnChoice, Listing, Log, Reading, list_folder
from engine.watch.renaming import AS_LOGGED, RenamedLog, Renaming

# If two formats have the same metric, the first one in this order counts: those with a time for each value come first.
FORMATS = (
    tensorboard.find,
    wandb_log.find,
    trackio.find,
    mlflow_database.find,
    mlflow_store.find,
    trainer_state.find,
    row_files.find,
)
FOLDER_FORMATS = frozenset({"tensorboard", "mlflow", "trainer-state"})
MAX_LOGS = 50  # per folder
MAX_SHARED_NAMES = 1000  # of metrics in several logs of one format
MAX_UNREAD = 10  # of a search
# A folder that was changed less than this before it was listed may change again without another modification time.
FRESH_SECONDS = 2.0
# Of these files, the content decides, or a folder beside them.
LATE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", ".db", ".yaml", *text_log.ENDINGS)
MAX_UNDECIDED = 50  # per folder; one with more is listed in each search
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
# A folder with both is a run of gputrain, which `engine.runs` reads.
OWN_FILES = frozenset({"events.jsonl", "owner.json"})
# A folder with both is a sweep of gputrain. Its study has rows that are no metrics of the program that runs beside it.
SWEEP_FILES = frozenset({"sweep.yaml", "optuna.jsonl"})


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

    def metric_key(self, name: str) -> str:
        """Return what the names of a metric in several logs have in common: `learner.loss` of a JSON object is
        `learner/loss` elsewhere."""
        return name.replace(".", "/")

    def log_ids(self) -> list[tuple[str, str, Path]]:
        """Return what tells each log from others: its format, its run, and its file or its folder.

        TensorBoard, MLflow and Hugging Face follow the new files of a folder on their own.
        """
        return [
            (log.format, log.run, self.folder if log.format in FOLDER_FORMATS else log.files[0]) for log in self.logs
        ]

    @property
    def has_ended(self) -> bool:
        """Whether a log said that the run had ended when it was found."""
        return any(log.has_ended for log in self.logs)

    @property
    def shares_file(self) -> bool:
        """Whether its log is a part of a file, and tells when that part was written."""
        return any(log.changed_at is not None for log in self.logs)

    def changed_at(self) -> float:
        """Return when its files, or its part of one, were last written, in Unix seconds; 0 if all are gone."""
        if self.shares_file:
            return max((log.changed_at() for log in self.logs if log.changed_at is not None), default=0.0)
        files = (path for log in self.logs for path in (log.list_files() if log.list_files is not None else log.files))
        return max(map(_modified_ns, files), default=0) / 1e9

    def read_parameters(self) -> Parameters:
        """Read the files with parameters beside its logs. They may be of another run if it shares its folder."""
        return {} if self.logs[0].run else read_parameters(self.folder)


@dataclass(frozen=True)
class FoundRuns:
    """The runs below a path, sorted by name. `is_partial` tells that some files, folders or runs were not read.

    `own` are the folders of runs of gputrain, which are not among `runs`, and `unread` names files that look like
    metrics, in folders without a log.
    """

    runs: tuple[ForeignRun, ...]
    is_partial: bool = False
    own: frozenset[Path] = frozenset()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchLimits:
    """How much of a tree is searched: folders, how deep they are nested, runs, and entries that were not listed before.

    Folders with one of the `skipped` names are not searched. `reads_text` tells that text files with printed metrics
    are runs, too, and `names_unread` that files are named which look like metrics. `choice` is how files of rows are
    read.
    """

    depth: int = 12
    folders: int = 100_000
    runs: int = 10_000
    entries: int = 1_000_000_000
    skipped: frozenset[str] = SKIPPED_FOLDERS
    reads_text: bool = True
    names_unread: bool = False
    choice: ColumnChoice = NO_CHOICE


def find_runs(path: Path, limits: SearchLimits = SearchLimits()) -> FoundRuns:
    """Find the runs in and below a folder, or the one of a file. A missing or inaccessible path has none."""
    return merge_runs(RunFinder(path, limits).search())


def merge_runs(parts: Iterable[FoundRuns]) -> FoundRuns:
    """Return the runs of several searches, each once."""
    runs, is_partial, own, unread = dict[str, ForeignRun](), False, set[Path](), dict[str, None]()
    for part in parts:
        unread |= dict.fromkeys(part.unread[: MAX_UNREAD - len(unread)])
        for run in part.runs:
            runs.setdefault(run.key, run)
        is_partial = is_partial or part.is_partial
        own |= part.own
    # What a training printed, above the folder of what it recorded, is no other run.
    printed = {run.key for run in runs.values() if run.formats == (text_log.FORMAT,)}
    above = {folder for run in runs.values() if printed for folder in run.folder.parents}
    kept = [run for run in runs.values() if run.key not in printed or run.folder not in above]
    return FoundRuns(tuple(sorted(kept, key=lambda run: run.name)), is_partial, frozenset(own), tuple(unread))


def require_unwatched(folder: Path, watched: Iterable[Path]) -> None:
    """Raise UsageError if a folder lies in one of those that are only watched."""
    real = Path(os.path.realpath(folder))
    if any(real.is_relative_to(os.path.realpath(path)) for path in watched):
        reason = "belongs to another program, and gputrain writes nothing there; start gputrain in another folder"
        raise UsageError.one(str(real), reason, code="not-supported")


class RunFinder:
    """Searches one path, again and again. A folder with a log is listed again when its modification time has changed:
    only then has it new files."""

    def __init__(self, path: Path, limits: SearchLimits = SearchLimits()) -> None:
        self._root = Path(os.path.realpath(path))
        self._limits = limits
        self._known: dict[Path, _Folder] = {}
        self._num_listed = 0

    def search(self) -> Iterator[FoundRuns]:
        """Yield the runs of each folder, none for most."""
        root = self._root
        if not is_folder(root):
            if is_file(root):
                listing = Listing(root.parent, (root.name,), (), choice=self._limits.choice)
                logs = self._logs_in(listing)
                yield FoundRuns(tuple(_runs_in(root.parent, root.stem, logs, root)), unread=self._unread(listing, logs))
            return
        limits, num_runs, num_folders, self._num_listed = self._limits, 0, 0, 0
        # The upper folders first: a limit then leaves out the depths of a data set.
        pending = deque([(root, "", 0)])
        while pending:
            folder, name, depth = pending.popleft()
            num_folders += 1
            if num_folders > limits.folders or num_runs >= limits.runs or self._num_listed > limits.entries:
                yield FoundRuns((), is_partial=True)
                return
            known = self._list(folder)
            if known.is_own:
                yield FoundRuns((), own=frozenset({folder}))
                continue
            runs = tuple(_runs_in(folder, name or root.name, known.logs, folder))[: limits.runs - num_runs]
            num_runs += len(runs)
            unread = tuple(f"{name}/{text}" if name else text for text in known.unread)
            yield FoundRuns(runs, known.is_partial, unread=unread)
            if depth == limits.depth:
                continue
            for inner, inner_name in known.inner:
                pending.append((inner, f"{name}/{inner_name}" if name else inner_name, depth + 1))

    def _logs_in(self, listing: Listing) -> list[Log]:
        return logs_in(listing) or (text_log.find(listing) if self._limits.reads_text else [])

    def _unread(self, listing: Listing, logs: Sequence[Log]) -> tuple[str, ...]:
        """Return sentences on the files of a folder without a log that look like metrics."""
        is_asked = self._limits.names_unread and not logs
        return tuple(map(printable, islice(row_files.unread(listing), MAX_UNREAD))) if is_asked else ()

    def _list(self, folder: Path) -> _Folder:
        known = self._known.get(folder)
        if known is not None and known.stamp == _stamp_of(known.watched):
            return known
        modified_ns = _modified_ns(folder)
        listing = list_folder(folder)._replace(choice=self._limits.choice)
        self._num_listed += len(listing.files) + len(listing.folders)
        is_own = OWN_FILES.issubset(listing.files)
        is_program = not is_own and not SWEEP_FILES.issubset(listing.files)
        logs = self._logs_in(listing) if is_program else []
        owned = self._limits.skipped.union(*(log.owned_folders for log in logs))
        # To join a path takes as long as to check a folder that has not changed.
        inner = tuple((folder / name, name) for name in listing.folders if name not in owned and name[0] != ".")
        undecided = _undecided(listing, logs) if is_program else []
        watched = (folder, *undecided[:MAX_UNDECIDED])
        stamp = (modified_ns, *_stamp_of(watched[1:]))
        unread = self._unread(listing, logs) if is_program else ()
        found = _Folder(watched, stamp, tuple(logs), inner, unread, is_own=is_own, is_partial=listing.is_partial)
        # A database gets runs without a new file.
        is_final = len(undecided) <= MAX_UNDECIDED and not any(log.run for log in logs)
        if is_final and time.time() - max(stamp) / 1e9 > FRESH_SECONDS:
            self._known[folder] = found
        else:
            self._known.pop(folder, None)
        return found


class _Folder(NamedTuple):
    """What a finder keeps of a folder: its logs, and its inner folders that may have runs.

    A change of what is `watched` changes the `stamp`: only then may there be others.
    """

    watched: tuple[Path, ...]
    stamp: tuple[int, ...]
    logs: tuple[Log, ...]
    inner: tuple[tuple[Path, str], ...]
    unread: tuple[str, ...]
    is_own: bool
    is_partial: bool


def _stamp_of(paths: Iterable[Path]) -> tuple[int, ...]:
    return tuple(map(_modified_ns, paths))


def _undecided(listing: Listing, logs: list[Log]) -> list[Path]:
    """Return what may become a log in an unchanged folder: a file gets its first line, or a checkpoint its state."""
    read = {path for log in logs for path in log.files}
    files = [listing.folder / name for name in listing.files if name.endswith(LATE_ENDINGS)]
    checkpoints = [listing.folder / name for name in listing.folders if name.startswith("checkpoint-")]
    return [path for path in (*files, *checkpoints) if path not in read]


def logs_in(listing: Listing) -> list[Log]:
    """Return the logs of a folder, the preferred one first."""
    return [log for find in FORMATS for log in find(listing)]


def _runs_in(folder: Path, name: str, logs: Sequence[Log], place: Path) -> Iterator[ForeignRun]:
    """Yield the run of a folder, and those that a log names. `place` is the folder, or its only file."""
    if own := [log for log in logs if not log.run][:MAX_LOGS]:
        given = next((f"{name.rpartition('/')[0]}/{log.name}".lstrip("/") for log in own if log.name), name)
        yield ForeignRun(printable(given), folder, tuple(own), str(place))
    for log in logs:
        if log.run:
            yield ForeignRun(printable(f"{name}/{log.run}"), folder, (log,), f"{log.files[0]}/{log.run}")


def _modified_ns(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime_ns  # noqa: PTH116 - a Path takes longer
    except OSError:
        return 0


class RunFollower:
    """Follows all logs of a run.

    If logs of two formats have a metric of the same name, it is the same one, and the preferred log's points count.
    Logs of one format record different things: such metrics are named by their file or folder, too. The logs are read
    in their order. If one that is being read gets a metric that a later log has had, or starts over, the later ones
    are read once more.
    """

    def __init__(self, run: ForeignRun, renaming: Renaming = AS_LOGGED) -> None:
        self._logs, self._key, self._labels = run.logs, run.metric_key, _labels(run)
        self._sources = [log.open() for log in run.logs]
        self._last = [UNREAD for _ in run.logs]
        self._renamed = [RenamedLog(renaming) for _ in run.logs]
        self._owners: dict[str, int] = {}
        self._shared: set[str] = set()
        """Names that logs of one format share."""
        self._starts_over = False

    def poll(self, max_bytes: int = POLL_BYTES) -> list[Reading]:
        """Return a reading for each log, in their order. All together read at most about `max_bytes`.

        `drop_from` of a reading concerns the points of the same log.
        """
        readings = []
        starts_over, self._starts_over = self._starts_over, False
        if starts_over:
            self._owners.clear()
        left = max_bytes
        for index, log in enumerate(self._logs):
            if starts_over:
                self._sources[index], self._last[index] = log.open(), UNREAD
            last = self._last[index]
            reading = self._sources[index].poll(left) if left > 0 else last.progress()
            self._last[index] = reading.progress()
            num_read = reading.read_bytes - last.read_bytes
            left -= num_read if num_read >= 0 else reading.read_bytes
            if starts_over:
                reading.drop_from = -math.inf
            # Most runs have one log, which needs no look at each point.
            if len(self._logs) > 1:
                starts_over = self._choose_points(index, reading) or starts_over
            readings.append(reading)
        for renamed, reading in zip(self._renamed, readings, strict=True):
            renamed.apply(reading)
        if self._starts_over:
            # The next poll reads all once more.
            readings[-1].total_bytes += 1
        return readings

    def _choose_points(self, index: int, reading: Reading) -> bool:
        """Leave out points of metrics that an earlier log has. Return whether the later logs have to start over."""
        owners = self._owners
        if self._shared and not self._shared.isdisjoint(reading.points.names):
            label = self._labels[index]
            reading.points = reading.points.renamed(lambda name: f"{label}/{name}" if name in self._shared else name)
        keys = {name: self._key(name) for name in reading.points.names}
        later = any(owners.get(key, index) > index for key in keys.values())
        if later or reading.drop_from == -math.inf:
            for key in [key for key, owner in owners.items() if owner >= index]:
                del owners[key]
            later = True
        for key in keys.values():
            owners.setdefault(key, index)
        taken = {name for name, key in keys.items() if owners[key] != index}
        if taken:
            self._share({name for name in taken if self._is_of_another(name, index)})
            reading.points = reading.points.only(lambda name: name not in taken)
        return later

    def _is_of_another(self, name: str, index: int) -> bool:
        """Whether the metric of this name in the log that has it is another one than that of a log."""
        owner = self._owners[self._key(name)]
        return self._logs[owner].format == self._logs[index].format and self._labels[owner] != self._labels[index]

    def _share(self, names: set[str]) -> None:
        """Name metrics by their logs from now on, for which all logs are read once more."""
        if names - self._shared and len(self._shared) < MAX_SHARED_NAMES:
            self._shared |= names
            self._starts_over = True


def _labels(run: ForeignRun) -> list[str]:
    """Return what each log of a run is called beside others of its format: its file or its folder."""
    logs = [(log, log.files[0] if log.files else run.folder) for log in run.logs]
    labels = [path.parent.name if log.format in FOLDER_FORMATS else path.stem for log, path in logs]
    return [
        printable(label if labels.count(label) == 1 else f"{path.parent.name}/{path.name}")
        for label, (_, path) in zip(labels, logs, strict=True)
    ]
