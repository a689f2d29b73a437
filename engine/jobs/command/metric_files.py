"""The curves of a command run: the metric files of its run folder, and those that it writes below its working folder.

The owner of the run searches for files with `MetricFiles`, and records where they are. `command_metrics` opens them as
one run of `engine.watch`, so that screens and reports show it as a watched one.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Annotated
from zlib import crc32

from engine.base import codec
from engine.base.codec import Count, FileRecord, Meta, Record, UnixTime, find_record, write_record
from engine.base.files import is_file, is_folder, open_regular_file
from engine.base.text import printable
from engine.jobs.command.rivals import Rivals, has_arguments
from engine.watch.folders import (
    FOLDER_FORMATS,
    SKIPPED_FOLDERS,
    ForeignRun,
    FoundRuns,
    RunFinder,
    SearchLimits,
    logs_in,
)
from engine.watch.json_lines import JsonLines
from engine.watch.parameters import Parameters, merge_parameters, read_parameters
from engine.watch.reading import Log, Source, list_folder
from engine.watch.resumed_log import resumed_log
from engine.watch.writers import Writers

METRICS_FOLDER = "metrics"
OUTPUT_FILE, OWN_FILE, FILES_FILE = "output.jsonl", "own.jsonl", "files.json"
"""Files in the metrics folder: what was found in the output, `$GPUTRAIN_METRICS`, and the places of all others."""
METRICS_VARIABLE = "GPUTRAIN_METRICS"
_LogId = tuple[str, str, Path]
MAX_LOGS = 100
MAX_ENDS = 100  # of a log
END_BYTES = 4096
MAX_FILES_BYTES = 1 << 20

# A working folder may be a home: of a search, as much as a second of a core can list.
DATA_FOLDERS = frozenset({"data", "dataset", "datasets", "env", "venv"})
SEARCH_LIMITS = SearchLimits(
    reads_text=False, depth=6, folders=3000, runs=5000, entries=200_000, skipped=SKIPPED_FOLDERS | DATA_FOLDERS
)
SEARCH_SECONDS = 1.5
START_SEARCH_SECONDS = 0.05
# Of a core, which decides only for a folder with more than 50 inner ones. A program creates most files when it starts.
FIRST_SHARE, FIRST_SECONDS, LATER_SHARE = 0.004, 60.0, 0.0005
# A file system may have coarser times than the clock.
START_SLACK_SECONDS = 0.05
_SOURCE = re.compile(r"^(?:train|training)[_/.]")


def make_metrics_folder(run: Path) -> Mapping[str, str]:
    """Create the folder of a run's metrics, and return the environment that tells the command of its own file.

    Raises OSError.
    """
    folder = run / METRICS_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    return {METRICS_VARIABLE: str(folder / OWN_FILE)}


@lru_cache(maxsize=4096)
def metric_key(name: str) -> str:
    """Return what two names of the same metric have in common: `train/loss` of a file is the `loss` of the output."""
    return re.sub(r"[^a-z0-9@%]+", "_", _SOURCE.sub("", name.lower()))


@dataclass(frozen=True)
class CommandMetrics(ForeignRun):
    """The metrics of a command run.

    A metric that several logs have counts once: that of `$GPUTRAIN_METRICS` before that of a file below the working
    folder, and the output last. `arguments` are the parameters of the command.
    """

    arguments: Parameters = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        return super().formats or ("command",)

    def metric_key(self, name: str) -> str:
        return metric_key(name)

    def changed_at(self) -> float:
        # A command may have no metrics.
        return super().changed_at() or _changed_at(self.folder)

    def log_ids(self) -> list[_LogId]:
        return [(log.format, log.run, log.files[0]) for log in self.logs]

    def read_parameters(self) -> Parameters:
        """Return the arguments, and what the files beside the metric files say."""
        folders = dict.fromkeys(path.parent for log in self.logs if not log.run for path in log.files)
        found: Parameters = {}
        for folder in folders:
            if not folder.is_relative_to(self.folder):
                found = merge_parameters(read_parameters(folder), found)
        return merge_parameters(found, self.arguments)


class FileEnd(Record, frozen=True, kw_only=True):
    """How long a file was when the command ended, and a checksum of its last bytes (`end_of`)."""

    path: Annotated[str, Meta(max_length=4096)]
    size: Count
    checksum: Count


class LogPlace(Record, frozen=True, kw_only=True):
    """A log that was found: its format, the name of its run in a file with several, and its file or folder. `ends` are
    its files when the command ended: what was appended later, and by whom, is not of this run."""

    kind: Annotated[str, Meta(max_length=50)]
    run: Annotated[str, Meta(max_length=1000)] = ""
    place: Annotated[str, Meta(max_length=4096)]
    start: Count = 0
    """Number of the start of the command that wrote it first, counted from 0."""
    begin: FileEnd | None = None
    """The file when the command began: its rows are of an earlier run."""
    ends: Annotated[tuple[FileEnd, ...], Meta(max_length=MAX_ENDS)] = ()


class FoundFiles(FileRecord, frozen=True, kw_only=True):
    """Content of `files.json`. `ended_at` is None until the command has ended; what is written later is not its own.
    `starts` is how often the command has begun."""

    ended_at: UnixTime | None = None
    starts: Count = 0
    logs: Annotated[tuple[LogPlace, ...], Meta(max_length=MAX_LOGS)] = ()


def command_metrics(run: Path, *, arguments: Parameters | None = None, is_own: bool = True) -> CommandMetrics:
    """Return the metrics of a command run that are there now; a run without any has no logs.

    Of a run that another user may have written (`is_own` is False), only the files in its folder are read.
    """
    found = find_record(run / METRICS_FOLDER / FILES_FILE, FoundFiles, MAX_FILES_BYTES) if is_own else None
    return _combine(run, found or FoundFiles(), arguments or {})


def _combine(
    run: Path, found: FoundFiles, arguments: Parameters, open_output: Callable[[], Source] | None = None
) -> CommandMetrics:
    elsewhere = _join_starts([(place, log) for place in found.logs for log in _open_place(place, found.ended_at)])
    logs = (*_own_logs(run, OWN_FILE), *elsewhere, *_own_logs(run, OUTPUT_FILE, open_output))
    return CommandMetrics(printable(run.name), run, logs, str(run), arguments=arguments)


def _join_starts(found: Sequence[tuple[LogPlace, Log]]) -> list[Log]:
    """Return the logs with those that several starts wrote as one log each: the first `metrics.csv` of a start follows
    the first of the start before it."""
    numbers = Counter[tuple[int, str, str]]()
    joined: dict[tuple[str, str, int], list[Log]] = {}
    for place, log in sorted(found, key=lambda pair: pair[0].start):
        name = log.run or ("" if log.format in FOLDER_FORMATS else PurePath(place.place).name)
        number = numbers[place.start, place.kind, name]
        numbers[place.start, place.kind, name] += 1
        joined.setdefault((place.kind, name, number), []).append(log)
    return [resumed_log(logs) for logs in joined.values()]


def _own_logs(run: Path, name: str, open_log: Callable[[], Source] | None = None) -> list[Log]:
    path = run / METRICS_FOLDER / name
    kind = f"${METRICS_VARIABLE}" if name == OWN_FILE else "output"
    return [Log(kind, (path,), open_log or (lambda: JsonLines(path)))] if is_file(path) else []


def _open_place(place: LogPlace, ended_at: float | None) -> Iterator[Log]:
    """Yield the log that was found in a place, unless all of it was written after the end of the command."""
    path = Path(place.place)
    folder = path if is_folder(path) else path.parent
    wanted = (place.kind, place.run, path)
    for log in logs_in(list_folder(folder)):
        if ForeignRun("", folder, (log,), "").log_ids() != [wanted]:
            continue
        times = [_changed_at(file) for file in log.files]
        is_own = ended_at is None or max(times, default=0.0) <= ended_at + START_SLACK_SECONDS
        if log.open_from is not None and (place.begin or (place.ends and not is_own)):
            begin, end = place.begin, None if is_own or not place.ends else place.ends[0]
            # Of a file that another run has replaced, nothing is left.
            if end is None or end_of(path, end.size) == end:
                first = begin.size if begin is not None and end_of(path, begin.size) == begin else 0
                yield replace(log, open=partial(log.open_from, first, None if end is None else end.size))
        elif is_own:
            yield log
        elif place.ends and (open_until := log.open_until) is not None:
            # Another run has written here since. Of a file that it has replaced, nothing is left.
            sizes = {Path(end.path): end.size for end in place.ends if end_of(Path(end.path), end.size) == end}
            if sizes:
                yield replace(
                    log, files=tuple(sizes), open=partial(open_until, sizes), list_files=partial(tuple, sizes)
                )
        elif ended_at is not None and min(times, default=0.0) <= ended_at + START_SLACK_SECONDS:
            yield log
        return


def end_of(path: Path, size: int | None = None) -> FileEnd | None:
    """Return the end of a file, or what it was when the file had `size` bytes; None if it has not as many."""
    try:
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            length = min(size, END_BYTES)
            data = os.pread(file.fileno(), length, size - length)
    except OSError:
        return None
    return FileEnd(path=str(path), size=size, checksum=crc32(data)) if len(data) == length else None


def _ends_of(place: LogPlace) -> tuple[FileEnd, ...]:
    files = [file for log in _open_place(place, None) for file in (log.list_files() if log.list_files else log.files)]
    return tuple(filter(None, map(end_of, files[:MAX_ENDS])))


class MetricFiles:
    """Searches for the files of a command, again and again, and records where they are. Not safe for threads."""

    def __init__(
        self,
        run: Path,
        *,
        cwd: Path,
        started_at: float,
        paths: Sequence[Path] = (),
        arguments: Parameters | None = None,
        members: Callable[[], Collection[int]] | None = None,
        open_output: Callable[[], Source] | None = None,
    ) -> None:
        """`started_at` is in Unix seconds. `paths` are those of `--metrics`, in place of the working folder.

        `members` returns the IDs of the processes of the command: a file that another process of this user has open for
        writing belongs to another command in the same folder. `open_output` opens the metrics of its output, which this
        process writes.
        """
        self._open_output = open_output
        self._members, self._writers, self._rivals = members, Writers(), Rivals(cwd)
        self._run, self._started_at = run, started_at
        self._arguments = arguments or {}
        # A container may write the files that `--metrics` names as another user.
        self._are_named = bool(paths)
        self._finders = [RunFinder(path, SEARCH_LIMITS) for path in paths or [cwd]]
        self._searching: Iterator[FoundRuns] | None = None
        self._next_search, self._search_seconds, self._num_searches = 0.0, 0.0, 0
        before = find_record(self._run / METRICS_FOLDER / FILES_FILE, FoundFiles, MAX_FILES_BYTES) or FoundFiles()
        self._start = before.starts
        # Another run may have overwritten a file since the end of the last start.
        kept = (place for place in before.logs if any(True for _ in _open_place(place, before.ended_at)))
        self._places = {(place.kind, place.run, Path(place.place)): place for place in kept}
        self._began = time.monotonic()
        self._earlier: set[_LogId] = set()
        self._begins: dict[_LogId, FileEnd | None] = {}
        self._shown: tuple[object, ...] = ()
        self.is_partial = False
        """Whether the search has met one of its limits: `--metrics` names the place of the files."""
        self.metrics = self._update(None)
        # What is there before the command starts is of an earlier run.
        self._num_searches = int(self._search(time.monotonic() + START_SEARCH_SECONDS))

    @property
    def seconds(self) -> float:
        """How long the files have been searched for."""
        return time.monotonic() - self._began

    @property
    def may_lack_files(self) -> bool:
        """Whether no file was found, and not all places were searched."""
        return self.is_partial and not self._places

    def poll(self, max_seconds: float = 0.05) -> CommandMetrics:
        """Search for about `max_seconds` if it is time to, and return the metrics: the same object if it finds nothing.

        Raises OSError if the places cannot be recorded.
        """
        if self._searching is None and time.monotonic() < self._next_search:
            return self._update(None)
        if self._search(time.monotonic() + max_seconds):
            self._num_searches += 1
            share = FIRST_SHARE if self.seconds < FIRST_SECONDS else LATER_SHARE
            self._next_search = time.monotonic() + max(SEARCH_SECONDS, self._search_seconds / share)
        return self._update(None)

    def close(self, max_seconds: float = 2.0) -> CommandMetrics:
        """Search once more, because the command has ended, record the end, and return the metrics. Raises OSError."""
        ended_at = time.time()
        self._searching = None
        self._search(time.monotonic() + max_seconds)
        return self._update(ended_at)

    def _update(self, ended_at: float | None) -> CommandMetrics:
        """Record the places and open the logs if there are others than before."""
        places = tuple(self._places.values())
        if ended_at is not None:
            places = tuple(codec.replace(place, ends=_ends_of(place)) for place in places)
        found = FoundFiles(ended_at=ended_at, starts=self._start + 1, logs=places)
        own = [is_file(self._run / METRICS_FOLDER / name) for name in (OWN_FILE, OUTPUT_FILE)]
        if self._shown != (found, *own):
            if found.logs or ended_at is not None:
                write_record(self._run / METRICS_FOLDER / FILES_FILE, found)
            self._shown = (found, *own)
            self.metrics = _combine(self._run, found, self._arguments, self._open_output)
        return self.metrics

    def _search(self, deadline: float) -> bool:
        """Begin or continue a search until `deadline`. Return whether it is over."""
        began = time.thread_time()
        if self._searching is None:
            self._searching = (part for finder in self._finders for part in finder.search())
            self._search_seconds = 0.0
        for part in self._searching:
            self.is_partial |= part.is_partial
            for run in part.runs:
                self._add(run)
            if time.monotonic() > deadline:
                self._search_seconds += time.thread_time() - began
                return False
        self._search_seconds += time.thread_time() - began
        self._searching = None
        return True

    def _add(self, run: ForeignRun) -> None:
        """Add the logs of a run that have changed since the start of the command."""
        if run.folder.is_relative_to(os.path.realpath(self._run)):
            return
        for log, log_id in zip(run.logs, run.log_ids(), strict=True):
            if log_id in self._places or log_id in self._earlier or len(self._places) == MAX_LOGS:
                continue
            # A database has the runs of other days.
            if log.run and not self._num_searches:
                self._earlier.add(log_id)
            elif any(_changed_at(file) >= self._started_at - START_SLACK_SECONDS for file in log.files):
                if self._is_of_others(log):
                    continue
                kind, name, place = log_id
                begin = self._begins.get(log_id)
                self._places[log_id] = LogPlace(kind=kind, run=name, place=str(place), start=self._start, begin=begin)
            elif log.open_from is not None and len(self._begins) < MAX_LOGS and log_id not in self._begins:
                # Later rows are those of the command.
                self._begins[log_id] = end_of(log.files[0])

    def _is_of_others(self, log: Log) -> bool:
        """Whether another user wrote a file of the log, a process that is not of the command has it open, or another
        command in the same folder may have written it."""
        if not self._are_named and any(_is_foreign(file) for file in log.files):
            return True
        if self._members is None:
            return False
        writer, members = self._writers.writer_of(log.files), self._members()
        if writer is not None:
            return writer.pid not in members
        if self._are_named:
            return False
        if self._rivals.names_file(log.files, members):
            return False
        rivals = self._rivals.find(frozenset(members))
        return bool(rivals) and not has_arguments(log, self._arguments, rivals)


def _is_foreign(path: Path) -> bool:
    """Whether a file belongs to another user than this one and root, as which containers write."""
    try:
        return os.lstat(path).st_uid not in (os.geteuid(), 0)
    except OSError:
        return True


def _changed_at(path: Path) -> float:
    """Return when a file was created or changed, in Unix seconds; 0 if it is gone."""
    try:
        return os.stat(path, follow_symlinks=False).st_ctime  # noqa: PTH116 - a Path takes longer
    except OSError:
        return 0.0
