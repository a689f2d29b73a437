"""Show what `gputrain run --parse` would find in a file with the output of a training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.base.colors import without_colors
from engine.base.errors import file_errors, raise_if_any
from engine.base.files import open_regular_file
from engine.base.text import printable
from engine.runs.folder import RunFolder
from engine.runs.root import is_run_folder
from engine.watch.line_names import may_be_metric
from engine.watch.output_metrics import OutputMetrics
from engine.watch.points import Point
from engine.watch.reading import Reading
from engine.watch.restarts import Restarts, restart_note
from engine.watch.text_log import feed_line

MAX_FORMATS, MAX_UNREAD, MAX_SHOWN_LINE = 20, 5, 160
MAX_READ_BYTES = 1 << 20  # a longer line is skipped
# What gputrain itself writes to the log of a run begins with a time, see `engine.runs.event_lines`.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")


@dataclass
class TriedMetric:
    """Number of values of a metric, its first and last step, and its last value."""

    count: int
    first_step: int
    last_step: int
    last: float


@dataclass
class TriedFormat:
    """Lines with the same metrics: the last line of the first record, its points, and the number of records."""

    example: str
    points: Sequence[Point]
    count: int = 0


@dataclass
class TriedFile:
    """The metrics that a file has by name, the formats of its lines, and how many lines have any metric."""

    metrics: dict[str, TriedMetric] = field(default_factory=dict)
    formats: dict[tuple[str, ...], TriedFormat] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """The first lines that look like metrics and are none."""
    notes: Sequence[str] = ()
    """Which lines were skipped, and which metrics were renamed."""
    num_lines: int = 0
    num_used: int = 0
    num_unread: int = 0

    def add(self, line: str, points: Sequence[Point]) -> None:
        """Add a line, and the format of the points that were found with it."""
        if points:
            names = tuple(dict.fromkeys(point.name for point in points))
            if names in self.formats or len(self.formats) < MAX_FORMATS:
                self.formats.setdefault(names, TriedFormat(printable(line[:MAX_SHOWN_LINE]), points)).count += 1
        elif may_be_metric(line):
            self.num_unread += 1
            self.unread += [printable(line[:MAX_SHOWN_LINE])] if len(self.unread) < MAX_UNREAD else []


def try_parse(path: Path, patterns: Sequence[str] = (), max_bytes: float = math.inf) -> TriedFile:
    """Return what is found in the first `max_bytes` of a file.

    Raises UsageError for a bad pattern, or a file that cannot be read.
    """
    parser, tried, restarts, reading = OutputMetrics(patterns), TriedFile(), Restarts(), Reading()
    place = path.absolute()
    is_log = is_run_folder(place.parent) and place == RunFolder(place.parent).log
    with file_errors(printable(str(path)), "cannot be read"):
        for line in _read_lines(path, max_bytes):
            if is_log and _STAMP.match(line):
                continue
            points = feed_line(parser, line)
            restarts.add_points(points, reading)
            tried.num_lines += 1
            tried.num_used += bool(points)
            if points or not parser.is_holding:
                tried.add(without_colors(line.rstrip().rpartition("\r")[2]), points)
        restarts.add_points(points := parser.finish(), reading)
        tried.add("", points)
        tried.notes = [*parser.notes, *restart_note(reading.restarts)]
    raise_if_any(parser.problems)
    for point in reading.points:
        known = tried.metrics.setdefault(point.name, TriedMetric(0, point.step, point.step, point.value))
        known.count, known.last_step, known.last = known.count + 1, point.step, point.value
    return tried


def _read_lines(path: Path, max_bytes: float) -> Iterator[str]:
    """Yield the lines as they were written. Raises OSError."""
    is_begun = False
    with open_regular_file(path) as file:
        while file.tell() < max_bytes and (line := file.readline(MAX_READ_BYTES)):
            is_rest, is_begun = is_begun, not line.endswith(b"\n")
            if not is_rest and len(line) < MAX_READ_BYTES:
                yield line.decode(errors="replace")
