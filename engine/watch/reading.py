"""What every reader of a foreign format returns, and the one interface of all readers.

A log is a file, or several files of one folder, in one format. `folders` finds the logs of a run and opens a `Source`
for each. The caller polls it: each poll reads a bounded number of bytes and returns a `Reading`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.base.text import printable
from engine.watch.line_names import is_result
from engine.watch.points import Point, Points, StepAxes

# 10,000 values of W&B take 250 ms of CPU time.
POLL_BYTES = 1 << 19
# A folder of a data set may have millions of files.
MAX_ENTRIES = 20_000
MAX_METRICS = 2000  # per log
MAX_NAME_LENGTH = 300
MAX_ROW_VALUES = 2000
MAX_ROW_DEPTH = 6
# What decides whether a file is a log: its beginning, and of how many files of a folder.
SNIFFED_BYTES, MAX_SNIFFED_FILES = 1 << 14, 20
MAX_STEP, MAX_EPOCH = (1 << 63) - 1, 1e9
MAX_NUMBER_DIGITS = 400
# Unix seconds of 2001 and 5138: a `time` column of seconds since the start lies below.
UNIX_TIMES = (1e9, 1e11)

# Names of the columns that are not metrics, the best first, in lower case.
STEP_NAMES = (
    "step", "global_step", "trainer/global_step", "_step", "iteration", "iter", "num_updates", "total_timesteps",
    "timesteps_total", "num_env_steps", "training_iteration", "current_steps",
)  # fmt: skip
EPOCH_NAMES = ("epoch", "epochs", "train/epoch", "epoch_num")
TIME_NAMES = ("_timestamp", "timestamp", "wall_time", "wall time", "time")
# In a row without any of them, the last word of a name says that it counts steps: `learner_steps`.
_STEP_ENDS = ("step", "steps", "iteration", "iterations", "iter", "iters", "updates", "timesteps", "frames", "episodes")
_STEP_WORD = re.compile(rf"(?:.*[/_. ])?(?:{'|'.join(_STEP_ENDS)})", re.IGNORECASE)
_GROUP = re.compile(r"^(?:.*[/.])?(?:(?:train|valid|val|test|eval)_)?")
# Neither are plans, counters of other things, and what identifies a process, also behind the name of a group.
IGNORED_NAMES = frozenset({
    "_runtime", "batch", "batch_idx", "rank", "total_steps", "max_steps", "percentage", "elapsed_time",
    "remaining_time", "remaining", "passed", "iter", "iterations", "pid", "lineno", "time_ms", "unnamed: 0",
    "seed", "best_epoch", "iterations_since_restore", "timesteps_since_restore", "time_since_restore",
})  # fmt: skip
PARAMETER_NAMES = frozenset({"config", "cfg", "hparams", "hyperparameters", "params", "args", "run"})
"""Names of the objects in a row that are the parameters of the run, and of the groups of such columns."""
_NUMBER_TEXT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
# What C prints on Windows
_ODD_NUMBER = re.compile(r"[-+]?(?:1\.#(?:QNAN|SNAN|IND|(?P<inf>INF))\w*|nan\(\w{1,8}\))", re.IGNORECASE)
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "%": 1.0}

_DECODER = json.JSONDecoder()
_NEXT_VALUE = re.compile(r"\s*(?=\S)")

Scalar = bool | int | float | str | None
"""Value of a parameter."""


class ColumnChoice(NamedTuple):
    """What the user chose for files of rows: the column that is the x axis, and a pattern of the metrics."""

    x: str = ""
    metrics: str = ""

    def is_metric(self, name: str) -> bool:
        """Whether a column that is not on the x axis is shown."""
        if self.metrics:
            return fnmatchcase(name.lower(), self.metrics.lower())
        return not _is_ignored(name)


NO_CHOICE = ColumnChoice()


@lru_cache(maxsize=4096)
def _is_ignored(name: str) -> bool:
    first, *others = re.split("[/.]", name.lower())
    return bool(others and first in PARAMETER_NAMES) or (others or [first])[-1] in IGNORED_NAMES


@dataclass(slots=True)
class Reading:
    """What one poll found.

    `drop_from` voids the earlier points of this source from that step on, before `points` are added: a file was
    replaced (`-inf`: all points), or its writer restarted. `restarts` are the steps that it restarted from, of those
    that count. `parameters` are those that this poll found.
    `problem` is why a part cannot be read. `has_ended` tells that the writer has recorded its end. Only the journal of
    a training has `axes`.
    """

    points: Points = field(default_factory=Points)
    parameters: dict[str, Scalar] = field(default_factory=dict)
    drop_from: float | None = None
    restarts: tuple[float, ...] = ()
    read_bytes: int = 0
    total_bytes: int = 0
    problem: str | None = None
    has_ended: bool = False
    axes: StepAxes | None = None

    def void_from(self, step: float) -> None:
        """Void the points from a step on, those found so far, too: their writer has restarted."""
        self.points = self.points.before(step)
        self.restarts = (*(earlier for earlier in self.restarts if earlier < step), step)
        self.drop_from = step if self.drop_from is None else min(self.drop_from, step)

    def progress(self) -> Reading:
        """Return how far the log was read, without what was found."""
        return replace(self, points=Points(), parameters={}, drop_from=None, restarts=())

    @property
    def share(self) -> float:
        """Part of the bytes that has been read, from 0 to 1."""
        return min(self.read_bytes / self.total_bytes, 1.0) if self.total_bytes else 1.0


UNREAD = Reading(total_bytes=1)
"""The progress of a log that has not been read: its share is 0."""


class Source(Protocol):
    """Follows one log. It keeps its position, opens its files only during a poll, and never raises OSError."""

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read at most about `max_bytes` of what is new."""
        ...


@dataclass(frozen=True)
class Log:
    """A log of a folder: its format, its files, and the function that opens it.

    `run` names one of several runs in the file, and `name` the only one in place of its folder. `owned_folders` are
    subfolders that belong to the log and hold no run of their own. `list_files` returns the files of a log that
    gets others than it had when it was found. `open_until` opens the log as it was when its files had fewer bytes,
    and fewer files, than they have now. Of one of several runs in a file, `has_ended` tells that the file named it
    as ended when it was found, and `changed_at` returns when it was last written, in Unix seconds.
    """

    format: str
    files: tuple[Path, ...]
    open: Callable[[], Source]
    run: str = ""
    owned_folders: tuple[str, ...] = ()
    list_files: Callable[[], Iterable[Path]] | None = None
    open_until: Callable[[Mapping[Path, int]], Source] | None = None
    open_from: Callable[[int, int | None], Source] | None = None
    """Opens a file of rows as it is behind a number of bytes, up to another one."""
    has_ended: bool = False
    changed_at: Callable[[], float] | None = None
    name: str = ""


class Listing(NamedTuple):
    """The regular files and the folders of a folder by name, sorted and without links.

    `is_partial` tells that it has more than `MAX_ENTRIES` entries. `choice` is how the user wants its files read.
    """

    folder: Path
    files: tuple[str, ...]
    folders: tuple[str, ...]
    is_partial: bool = False
    choice: ColumnChoice = NO_CHOICE


def list_folder(folder: Path) -> Listing:
    """List a folder; an inaccessible one is empty."""
    files, folders, num_entries = [], [], 0
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, MAX_ENTRIES):
                num_entries += 1
                if entry.is_file(follow_symlinks=False):
                    files.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError:
        pass
    return Listing(folder, tuple(sorted(files)), tuple(sorted(folders)), num_entries == MAX_ENTRIES)


def files_below(folder: Path, max_depth: int) -> Iterator[tuple[str, Path]]:
    """Yield the name below a folder, and the path, of each regular file. Links are passed over."""
    pending = [("", folder)]
    while pending:
        prefix, path = pending.pop()
        inner = list_folder(path)
        if prefix.count("/") < max_depth:
            pending += [(f"{prefix}{name}/", path / name) for name in inner.folders[: MAX_ENTRIES - len(pending)]]
        yield from ((prefix + name, path / name) for name in inner.files)


class MetricNames:
    """The names of a log's metrics, one string each. Names beyond `MAX_METRICS` and too long ones are refused."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._is_full = self._has_odd_names = False

    def get(self, name: str) -> str | None:
        """Return the name with unprintable characters escaped, or None if it is refused."""
        known = self._names.get(name)
        if known is not None:
            return known
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            self._has_odd_names = True
            return None
        if len(self._names) >= MAX_METRICS:
            self._is_full = True
            return None
        self._names[name] = known = printable(name)
        return known

    @property
    def is_empty(self) -> bool:
        """Whether the log has had no metric so far."""
        return not self._names

    @property
    def problem(self) -> str | None:
        """Why some metrics are missing; None if none is."""
        if self._is_full:
            return f"only the first {MAX_METRICS:,} metrics are read"
        odd = f"metrics without a name, or with one of more than {MAX_NAME_LENGTH} characters, are not read"
        return odd if self._has_odd_names else None


def to_number(value: object) -> float | None:
    """Return a JSON value as a number, None for other text, booleans, lists and objects.

    A number may be text: JSON has no `NaN` and `Infinity`, and some trainers write all numbers so.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return float(value) if value.bit_length() < 1000 else None
    is_number = isinstance(value, str) and len(value) <= MAX_NUMBER_DIGITS and _NUMBER_TEXT.fullmatch(value)
    return float(value) if is_number and isinstance(value, str) else None


def parse_number(text: str) -> float | None:
    """Return a number of a text format; None if the text is no number. Blanks around it are ignored."""
    if len(text) > MAX_NUMBER_DIGITS:
        return None
    try:
        return float(text)
    except ValueError:
        odd = _ODD_NUMBER.fullmatch(text.strip())
        return None if odd is None else math.inf if odd["inf"] else math.nan


def parse_cell(text: str, *, decimal_commas: bool = False) -> float | None:
    """Return a number of a table: with separators of thousands, or a decimal comma, and with `%`, `k` or `M`."""
    if (number := parse_number(text)) is not None or not text:
        return number
    scale = SCALES.get(text[-1])
    body = text[:-1].rstrip() if scale is not None else text
    if decimal_commas and "." not in body and body.count(",") == 1:
        body = body.replace(",", ".")
    elif THOUSANDS.fullmatch(body):
        body = body.replace(",", "")
    number = parse_number(body)
    return None if number is None else number * (scale or 1.0)


def parse_json(text: bytes | str) -> Any:
    """Return a JSON value; None for anything else."""
    try:
        return json.loads(text)
    # Integers of more than 4300 digits are a ValueError, deep nesting is a RecursionError.
    except (ValueError, RecursionError):
        return None


def parse_json_values(text: str) -> list[Any]:
    """Return JSON values one behind another, up to the first that is incomplete."""
    values, position = list[Any](), 0
    while (match := _NEXT_VALUE.match(text, position)) is not None:
        try:
            value, position = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        values.append(value)
    return values


def parse_json_object(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None for anything else."""
    value = parse_json(text)
    return value if isinstance(value, dict) else None


def flat_numbers(row: Mapping[str, Any], max_values: int = MAX_ROW_VALUES) -> dict[str, float]:
    """Return the numbers of a JSON object, those of nested objects under names with dots."""
    return dict(_numbers(row, "", MAX_ROW_DEPTH, [max_values]))


def _numbers(row: Mapping[str, Any], prefix: str, depth: int, left: list[int]) -> Iterator[tuple[str, float]]:
    # W&B and trackio describe an image, a table or a histogram by an object with the key `_type`.
    if "_type" in row and prefix:
        return
    for key, value in row.items():
        if left[0] <= 0 or len(prefix) + len(key) > MAX_NAME_LENGTH:
            return
        left[0] -= 1
        if isinstance(value, dict):
            if depth > 1:
                yield from _numbers(value, f"{prefix}{key}.", depth - 1, left)
        elif (number := to_number(value)) is not None:
            yield f"{prefix}{key}", number


def first_column(names: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    """Return the name that comes first in `wanted`, compared in lower case; None if there is none."""
    by_key = {key: name for name in names if (key := name.lower()).endswith(wanted)}
    found = next((by_key[key] for key in wanted if key in by_key), None)
    if found is None and wanted is not TIME_NAMES:
        # `time/total_timesteps`, `valid_num_updates`, but not `rewards/iter`
        by_end = {_GROUP.sub("", key): by_key[key] for key in reversed(by_key) if not is_result(key)}
        found = next((by_end[key] for key in wanted if key in by_end), None)
    return found


class Columns(NamedTuple):
    """Which columns of a row are not metrics. Each may be missing."""

    step: str | None
    epoch: str | None
    time: str | None

    @classmethod
    def find(cls, names: Iterable[str], x: str = "") -> Columns:
        """Find the columns by their names. A column `x` that the user chose takes the place of the epoch, which may
        have fractions."""
        return _find_columns(tuple(names), x)


# The rows of a log have few different sets of names.
@lru_cache(maxsize=512)
def _find_columns(names: tuple[str, ...], x: str) -> Columns:
    step, epoch, time = (first_column(names, wanted) for wanted in (STEP_NAMES, EPOCH_NAMES, TIME_NAMES))
    if x:
        return Columns(None, x if x in names else None, None if time == x else time)
    if step is None and epoch is None:
        ends = (n for n in names if n.lower().endswith(_STEP_ENDS))
        step = next((n for n in ends if _STEP_WORD.fullmatch(n) and NO_CHOICE.is_metric(n)), None)
    return Columns(step, epoch, time)


def row_points(
    row: Mapping[str, float],
    columns: Columns,
    number: int,
    names: MetricNames,
    choice: ColumnChoice = NO_CHOICE,
    *,
    counts_rows: bool = False,
) -> Iterator[Point]:
    """Yield the points of one row.

    Its step is the step column, else a whole epoch, else the `number` of the row; only that if `counts_rows`.
    """
    epoch = row.get(columns.epoch) if columns.epoch else None
    epoch = epoch if epoch is not None and math.isfinite(epoch) else None
    step = to_step(row.get(columns.step) if columns.step else None)
    if step is None or counts_rows:
        is_whole = epoch is not None and epoch == int(epoch) and abs(epoch) < MAX_STEP and not counts_rows
        step = int(epoch) if epoch is not None and is_whole else number
    time = to_unix_time(row.get(columns.time) if columns.time else None)
    for key, value in row.items():
        is_axis = key in (columns.step, columns.epoch) or (key == columns.time and time is not None)
        if not is_axis and choice.is_metric(key) and (name := names.get(key)) is not None:
            yield Point(name, step, value, epoch, time)


def to_step(value: float | None) -> int | None:
    """Return a step, None if it is not a finite number in the range of 64 bits."""
    return int(value) if value is not None and math.isfinite(value) and abs(value) < MAX_STEP else None


def to_epoch(value: float | None) -> float | None:
    """Return an epoch, None if it is not finite or too large to be one."""
    return value if value is not None and abs(value) <= MAX_EPOCH else None


def to_unix_time(value: float | None) -> float | None:
    """Return a time in Unix seconds, which may be in milliseconds; None if the number cannot be one."""
    value = value / 1000 if value is not None and value > UNIX_TIMES[1] else value
    return value if value is not None and UNIX_TIMES[0] <= value <= UNIX_TIMES[1] else None
