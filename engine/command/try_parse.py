"""Show what `gputrain run --parse` would find in a file with the output of a training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.command.line_metrics import MAX_LINE_LENGTH
from engine.command.output_metrics import OutputMetrics
from engine.runs.root import is_run_folder
from engine.utils.errors import UsageError
from engine.utils.files import open_regular_file
from engine.utils.text import printable

MAX_FILE_BYTES = 1 << 28
MAX_READ_BYTES = 1 << 20  # a longer line is skipped
# Colors and other escape sequences: the log of a run keeps colors.
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")

# Lines of `engine.runs.event_lines`: in a log with a time, in a terminal from the start of a run on.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
_OWN_START = re.compile(r"\S+: (?:starting in /|process \d+ on )")
_OWN_LINE = re.compile(rf"{_OWN_START.pattern}|(?:finished|stopped|failed|warning)(?::|$)")


@dataclass
class TriedMetric:
    """Number of values of a metric, its first and last step, and its last value."""

    count: int
    first_step: int
    last_step: int
    last: float


@dataclass
class TriedFile:
    """The metrics that a file has by name, and how many of its lines have any.

    `problem` is why a part was not read.
    """

    metrics: dict[str, TriedMetric] = field(default_factory=dict)
    num_lines: int = 0
    num_used: int = 0
    problem: str | None = None


def try_parse(path: Path, patterns: Sequence[str] = ()) -> TriedFile:
    """Return what is found in a file. Raises UsageError for a bad pattern, or a file that cannot be read."""
    parser, tried = OutputMetrics(patterns), TriedFile()
    try:
        for line in _without_own_lines(_read_lines(path, tried), path):
            *drawn, final = line.split("\r")
            # A run sees a bar a few times per second; which of its states these are, the file does not tell.
            points = [point for text in drawn for point in parser.feed_drawn([text])] + parser.feed(final)
            tried.num_lines += 1
            tried.num_used += bool(points)
            for point in points:
                known = tried.metrics.setdefault(point.name, TriedMetric(0, point.step, point.step, point.value))
                known.count, known.last_step, known.last = known.count + 1, point.step, point.value
    except OSError as error:
        raise UsageError.one(printable(str(path)), f"cannot be read: {error.strerror}", code="not-readable") from error
    return tried


def _read_lines(path: Path, tried: TriedFile) -> Iterator[str]:
    """Yield the lines without colors. One that was redrawn has carriage returns. Raises OSError."""
    left, is_begun = MAX_FILE_BYTES, False
    with open_regular_file(path) as file:
        while line := file.readline(min(left, MAX_READ_BYTES)):
            left -= len(line)
            is_rest, is_begun = is_begun, not line.endswith(b"\n")
            if is_rest or len(line) == MAX_READ_BYTES:
                continue
            parts = line.decode(errors="replace").rstrip("\r\n").split("\r")
            yield "\r".join(_ESCAPES.sub("", text) if len(text) <= 4 * MAX_LINE_LENGTH else text for text in parts)
        if not left and file.read(1):
            tried.problem = f"only the first {MAX_FILE_BYTES >> 20} MiB were read"


def _without_own_lines(lines: Iterator[str], path: Path) -> Iterator[str]:
    """Yield the lines without those of gputrain: those with a time in the log of a run, or what `gputrain run` prints
    around the output of a command."""
    is_log, is_printed = is_run_folder(path.absolute().parent), False
    for line in lines:
        is_printed = is_printed or _OWN_START.match(line) is not None
        if not ((is_log and _STAMP.match(line)) or (is_printed and _OWN_LINE.match(line))):
            yield line
