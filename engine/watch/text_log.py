"""Read the metrics that a program printed into a text file, such as `python train.py > train.log`.

`output_metrics` reads the lines. A folder has such a log only if it has no other one, and the log that was written last
counts: what a program prints is mostly a part of what it records.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path

from engine.base.files import find_file_stamp
from engine.watch.growing_file import GrowingFile, head_lines, read_head
from engine.watch.output_metrics import OutputMetrics
from engine.watch.points import Point
from engine.watch.reading import MAX_SNIFFED_FILES, POLL_BYTES, Listing, Log, Reading
from engine.watch.restarts import Restarts

FORMAT = "text"
ENDINGS = (".log", ".out")
_NAMES = re.compile(r"(?:.*[_.-])?(?:log|logs|output|stdout|train|training)(?:[_.-].*)?\.txt", re.IGNORECASE)
HEAD_BYTES = 1 << 16
MIN_POINTS = 3  # in the beginning of a file
MAX_TRIED_FILES = 5  # of a folder, the newest
# To search for a part of a name costs a thousandth of reading the lines.
_RESULT = re.compile(
    rb"loss|acc|prec|f1|auc|recall|iou|dice|psnr|ssim|bleu|rouge|mae|mse|nll|ppl|perplex|rew|return|score|error|learn",
    re.IGNORECASE,
)
# Colors and other escape sequences
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
# A program that draws the whole screen begins a new line.
_NEW_SCREEN = re.compile(r"\x1b\[[0-9;]{0,8}[HJ]")
MAX_ESCAPED_LENGTH = 1 << 14


def find(listing: Listing) -> list[Log]:
    """Return the log of a folder: the text file that was written last of those with metrics in their beginning."""
    names = [name for name in listing.files if name.endswith(ENDINGS) or _NAMES.fullmatch(name)]
    paths = [listing.folder / name for name in names[:MAX_SNIFFED_FILES]]
    paths.sort(key=lambda path: (find_file_stamp(path) or (0, 0, 0))[2], reverse=True)
    return next(([_log(path)] for path in paths[:MAX_TRIED_FILES] if _is_log(path)), [])


def _log(path: Path) -> Log:
    return Log(FORMAT, (path,), lambda: TextLog(path))


def _is_log(path: Path) -> bool:
    stamp = find_file_stamp(path)
    if stamp is None:
        return False
    # The head of a growing log stays the same.
    return _has_metrics(path, stamp[0], stamp[1] if stamp[1] < HEAD_BYTES else HEAD_BYTES)


@lru_cache(maxsize=4096)
def _has_metrics(path: Path, inode: int, size: int) -> bool:
    del inode, size
    if _RESULT.search(read_head(path, HEAD_BYTES)) is None:
        return False
    parser, num_points = OutputMetrics(), 0
    for line in head_lines(path, HEAD_BYTES):
        num_points += len(feed_line(parser, line.decode(errors="replace")))
        if num_points >= MIN_POINTS:
            return True
    return False


def feed_line(parser: OutputMetrics, line: str) -> list[Point]:
    """Return the points of a line as a program wrote it: with colors, and with the states of a bar that it redrew."""
    if "\r" not in line and "\x1b" not in line:
        return parser.feed(line.rstrip("\n"))
    *drawn, final = _NEW_SCREEN.sub("\r", line.rstrip("\r\n")).split("\r")
    # A run sees a bar a few times per second; which of its states these are, the file does not tell.
    points = [point for text in drawn for point in parser.feed_drawn([_plain(text)])]
    return points + parser.feed(_plain(final))


def _plain(text: str) -> str:
    return _ESCAPES.sub("", text) if len(text) <= MAX_ESCAPED_LENGTH else text


class TextLog:
    """Follows one text file."""

    def __init__(self, path: Path) -> None:
        self._file, self._parser, self._restarts = GrowingFile(path), OutputMetrics(), Restarts()

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read the complete lines of at most about `max_bytes`."""
        reading = Reading()
        try:
            with self._file.opened() as was_replaced:
                if was_replaced:
                    reading.drop_from, self._parser, self._restarts = -math.inf, OutputMetrics(), Restarts()
                for line in self._file.read_lines(max_bytes):
                    self._restarts.add_points(feed_line(self._parser, line.decode(errors="replace")), reading)
                if not self._file.unread_bytes:
                    self._restarts.add_points(self._parser.finish(), reading)
        except OSError as error:
            reading.problem = f"{self._file.path.name} cannot be read: {error.strerror}"
        reading.read_bytes, reading.total_bytes = self._file.offset, self._file.size
        return reading
