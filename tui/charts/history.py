"""The recent past of a reading: a bounded store at three resolutions, and its graph in Braille characters."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, repeat
from operator import itemgetter
from typing import cast

from rich.text import Text

from engine.gpus.snapshot import Gpu, Snapshot
from engine.report.readings import READINGS
from tui.terminal.palette import MUTED, load_style

# Seconds per bucket and number of buckets: 10 minutes, 3 hours and 2 days.
LEVELS = ((1.0, 600), (10.0, 1080), (120.0, 1440))
# A value holds until the next one, if that is not later than this: the screens poll every 5 s at most.
MAX_HOLD_SECONDS = 6.0
# Seconds that graphs show: `MIN_SPAN` until the recorded past is longer, then `MAX_SPAN`. A shorter graph would move
# with every value.
MIN_SPAN, MAX_SPAN = 300.0, 600.0
MAX_CACHED_GRAPHS = 4  # of different widths
MAX_DRAWN_GRAPHS = 128
DOTS_PER_COLUMN, DOTS_PER_ROW = 2, 4
# Seconds between the labels of a time axis, and columns for each of them.
AXIS_STEPS = (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
AXIS_LABEL_COLUMNS = 14
BLANK_BRAILLE = 0x2800
# Bits of the dots of a Braille character from the bottom up, left and right column (Unicode 15, section 21.1).
LEFT_DOTS, RIGHT_DOTS = (0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08)


def _filled(left: int, right: int) -> str:
    """Return the Braille character with `left` and `right` dots (0 to 4) filled from the bottom."""
    bits = sum(LEFT_DOTS[:left]) + sum(RIGHT_DOTS[:right])
    return chr(BLANK_BRAILLE + bits) if bits else " "


FILLED = [[_filled(left, right) for right in range(DOTS_PER_ROW + 1)] for left in range(DOTS_PER_ROW + 1)]


class _Level:
    """A ring of mean values per bucket of `seconds`."""

    def __init__(self, seconds: float, size: int) -> None:
        self.seconds, self.size = seconds, size
        self._means = array("f", [math.nan]) * size
        self._latest = -1
        """Number of the latest bucket since the epoch."""
        self._count = 0
        """Number of values in the latest bucket."""

    def add(self, time: float, value: float, held: float) -> None:
        """Add a value. Buckets that were skipped since the last one get the value `held`, NaN for none."""
        bucket = int(time // self.seconds)
        if bucket < self._latest - self.size:
            # The clock was set back.
            self._latest = -1
        if bucket > self._latest:
            for skipped in range(max(self._latest + 1, bucket - self.size + 1), bucket + 1):
                self._means[skipped % self.size] = held
            self._latest, self._count = bucket, 0
        elif bucket < self._latest:
            return
        self._count += 1
        mean = self._means[bucket % self.size]
        self._means[bucket % self.size] = value if self._count == 1 else mean + (value - mean) / self._count

    @property
    def latest_start(self) -> float:
        """Unix seconds at which the latest bucket begins. Earlier buckets keep their means."""
        return self._latest * self.seconds

    def mean(self, start: float, end: float) -> float | None:
        """Return the mean of the buckets that begin in [`start`, `end`), or of the one around `start`."""
        first = math.ceil(start / self.seconds)
        last = max(math.ceil(end / self.seconds), first + 1)
        if first * self.seconds >= end:
            first, last = int(start // self.seconds), int(start // self.seconds) + 1
        known = range(max(first, self._latest - self.size + 1), min(last, self._latest + 1))
        values = [value for bucket in known if not math.isnan(value := self._means[bucket % self.size])]
        return sum(values) / len(values) if values else None


class LoadHistory:
    """The past values of one reading, for up to two days in 12 KiB."""

    def __init__(self) -> None:
        self._levels = [_Level(seconds, size) for seconds, size in LEVELS]
        self.latest_time = 0.0
        """Unix seconds of the latest value; 0 without one."""
        self.start_time: float | None = None
        """Unix seconds of the first value; None before it."""
        self._held = math.nan
        """The latest value, NaN if it is unknown."""
        self._final_means: dict[tuple[int, float], dict[int, float | None]] = {}
        """Means of columns that later values do not change, by level and seconds per column."""
        self._latest_columns: dict[tuple[float, int], tuple[int, list[float | None]]] = {}
        """Number of the last column, and the means of complete columns, by seconds and number of the columns."""

    def add(self, time: float, value: float | None) -> None:
        """Add the value at `time` (Unix seconds); times increase. None is an unknown value, shown as a gap."""
        if self.start_time is None:
            self.start_time = time
        held = self._held if 0 <= time - self.latest_time <= MAX_HOLD_SECONDS else math.nan
        latest = math.nan if value is None or not math.isfinite(value) else value
        self.latest_time, self._held = time, latest
        if not math.isnan(latest):
            for level in self._levels:
                level.add(time, latest, held)

    def columns(self, seconds: float, count: int, now: float | None = None) -> list[float | None]:
        """Return `count` means over the last `seconds` before `now`, by default the latest time; None for no data.

        The limits between columns stay the same while time passes, so that a drawn graph only moves. A wide column
        appears when it is complete, or the graph would change with every value.
        """
        end = self.latest_time if now is None else now
        index, width = _level_and_width(seconds, count)
        level = self._levels[index]
        last = math.floor(end / width) - (width > level.seconds)
        latest, columns = self._latest_columns.get((seconds, count), (None, []))
        if latest == last and width > level.seconds:
            return columns
        known = self._final_means.get((index, width), {})
        means = {
            column: known[column] if column in known else level.mean(column * width, (column + 1) * width)
            for column in range(last - count + 1, last + 1)
        }
        if len(self._final_means) >= MAX_CACHED_GRAPHS:
            self._final_means.clear()
            self._latest_columns.clear()
        first_open = math.floor(level.latest_start / width)
        self._final_means[index, width] = {column: mean for column, mean in means.items() if column < first_open}
        columns = list(means.values())
        self._latest_columns[seconds, count] = last, columns
        return columns


def _level_and_width(seconds: float, count: int) -> tuple[int, float]:
    """Return which of `LEVELS` holds `seconds`, and the seconds per column of `count` columns."""
    index = next((index for index, (step, size) in enumerate(LEVELS) if step * size >= seconds), len(LEVELS) - 1)
    step, width = LEVELS[index][0], seconds / count
    # Wide columns have a whole number of buckets, or they would differ in their number of values.
    return index, round(width / step) * step if width > step else width


def shown_seconds(seconds: float, count: int) -> float:
    """Return the time that `LoadHistory.columns(seconds, count)` covers, which differs a little from `seconds`."""
    return _level_and_width(seconds, count)[1] * count


def history_graph(values: Sequence[float | None], rows: int) -> Sequence[Text]:
    """Draw percentages as `rows` lines of filled Braille, two values per column, colored from calm to hot.

    A value of 0 has one dot, and None has none. A graph of one row is colored by value, a taller one by height. The
    lines are cached; do not modify them.
    """
    return _drawn_graph(tuple(values), rows)


@lru_cache(maxsize=MAX_DRAWN_GRAPHS)
def _drawn_graph(values: tuple[float | None, ...], rows: int) -> tuple[Text, ...]:
    dots = [0 if value is None else _dots(value, rows) for value in values]
    pairs = list(zip(dots[::2], [*dots[1::2], 0], strict=False))
    lines = []
    for row in reversed(range(rows)):
        # Dots of the whole column -> dots of this row.
        in_row = [min(max(dot - row * DOTS_PER_ROW, 0), DOTS_PER_ROW) for dot in range(rows * DOTS_PER_ROW + 1)]
        cells = [FILLED[in_row[left]][in_row[right]] for left, right in pairs]
        line = Text(no_wrap=True, end="")
        for style, group in groupby(zip(_styles(values, pairs, row, rows), cells, strict=True), key=itemgetter(0)):
            line.append("".join(cell for _, cell in group), style)
        lines.append(line)
    return tuple(lines)


def _styles(values: Sequence[float | None], pairs: Sequence[tuple[int, int]], row: int, rows: int) -> Iterable[str]:
    """Return the style of each column of a row."""
    if row > 0:
        return repeat(load_style(100.0 * (row + 0.5) / rows), len(pairs))
    if rows > 1:
        low = load_style(50.0 / rows)
        return [MUTED if left <= 1 and right <= 1 else low for left, right in pairs]
    highest = [max(left or 0.0, right or 0.0) for left, right in zip(values[::2], [*values[1::2], 0.0], strict=False)]
    return [
        MUTED if left <= 1 and right <= 1 else load_style(value)
        for (left, right), value in zip(pairs, highest, strict=True)
    ]


def _dots(value: float, rows: int) -> int:
    """Return the number of dots above the baseline, at least one."""
    return max(round(min(max(value, 0.0), 100.0) / 100 * rows * DOTS_PER_ROW), 1)


def time_axis(seconds: float, columns: int, reserved: int = 0, end: str = "now") -> Text:
    """Return the labels of a time axis, at round times before its end: `-10 min    -5 min    now`.

    The first `reserved` columns have no labels.
    """
    max_labels = max(columns // AXIS_LABEL_COLUMNS, 1)
    step = next((step for step in AXIS_STEPS if seconds // step <= max_labels), AXIS_STEPS[-1])
    size, unit = next((size, unit) for size, unit in ((3600, "h"), (60, "min"), (1, "s")) if step % size == 0)
    line = [" "] * columns
    # A label that is a little too old for the axis is at its left end.
    for count in range(int(1.05 * seconds // step), 0, -1):
        ago = count * step
        start, label = max(round((1 - ago / seconds) * columns), 0), f"-{ago // size} {unit}"
        # The label of the end needs 3 columns and a gap.
        if reserved <= start <= columns - 4 - len(label):
            line[start : start + len(label)] = label
    if columns >= 3:
        line[columns - len(end) : columns] = end
    return Text("".join(line[:columns]), MUTED, no_wrap=True, end="")


# From this size, a graph has labels on its y axis.
MIN_LABELED_COLUMNS, MIN_LABELED_ROWS = 32, 5


@dataclass(frozen=True)
class LoadPlot:
    """Size of a graph with its labels: `columns` and `rows` of Braille, `label_width` left of them, an axis below."""

    columns: int
    rows: int
    label_width: int
    has_axis: bool

    @classmethod
    def fit(cls, width: int, height: int) -> LoadPlot:
        """Return the largest plot in a panel of this size."""
        label_width = 5 if width >= MIN_LABELED_COLUMNS and height >= MIN_LABELED_ROWS else 0
        has_axis = height >= 2
        return cls(max(width - label_width, 1), max(height - has_axis, 1), label_width, has_axis)

    @property
    def values(self) -> int:
        """Number of values that the plot shows."""
        return 2 * self.columns

    def lines(self, values: Sequence[float | None], seconds: float, limit: str) -> list[Text]:
        """Return the graph of `values` (percent of the limit), and a time axis of `seconds` that ends now."""
        graph = list(history_graph(values, self.rows))
        if self.label_width:
            labels = {0: f"{f'{limit:>3}':4.4}┤", self.rows - 1: "  0 ┤"}
            graph = [
                Text.assemble((labels.get(row, "    │"), MUTED), line, no_wrap=True, end="")
                for row, line in enumerate(graph)
            ]
        if self.has_axis:
            graph.append(Text.assemble(" " * self.label_width, time_axis(seconds, self.columns), no_wrap=True, end=""))
        return graph


LOAD_READINGS = ("util", "memory_used", "power", "sm_active", "tensor_active", "temperature")
"""Keys of the readings whose past is recorded."""


def load_of(gpu: Gpu, key: str) -> float | None:
    """Return a reading in percent of its limit; the temperature, which has none, in °C. None if it is unknown."""
    reading, value = READINGS[key], gpu.value(key)
    if reading.limit is None:
        return cast("float | None", value)
    share = reading.share(value, gpu.value(reading.limit))
    return None if share is None else 100 * share


class GpuLoads:
    """Histories of `LOAD_READINGS` and the last answer of each GPU, by its UUID."""

    def __init__(self) -> None:
        self._histories: dict[str, dict[str, LoadHistory]] = {}
        self._last_answers: dict[str, Gpu] = {}
        self.start_time: float | None = None
        """Unix seconds of the first snapshot; None before it."""

    def record(self, snapshot: Snapshot) -> None:
        """Add the readings of a snapshot. A GPU that did not answer gets a gap."""
        if self.start_time is None:
            self.start_time = snapshot.time
        for gpu in snapshot.gpus:
            if gpu.uuid is None:
                continue
            histories = self._histories.get(gpu.uuid)
            if histories is None:
                histories = self._histories[gpu.uuid] = {key: LoadHistory() for key in LOAD_READINGS}
            for key, history in histories.items():
                history.add(snapshot.time, load_of(gpu, key))
            if gpu.state == "ok":
                self._last_answers[gpu.uuid] = gpu

    def columns(self, uuid: str | None, key: str, seconds: float, count: int, now: float) -> list[float | None]:
        """Return `count` means of a reading over the last `seconds` before `now` (Unix seconds); None for no data."""
        histories = self._histories.get(uuid or "")
        return [None] * count if histories is None else histories[key].columns(seconds, count, now)

    def last_answer(self, gpu: Gpu) -> Gpu | None:
        """Return the GPU with the readings of its last answer; None if it never answered."""
        return gpu if gpu.state == "ok" else self._last_answers.get(gpu.uuid or "")
