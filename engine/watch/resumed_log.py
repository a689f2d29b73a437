"""Follow the logs that the starts of one run wrote, each a log of its own, as one: a start goes on from the one before.

Lightning writes `version_0`, `version_1` …, and Hugging Face a folder for each start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from engine.watch.reading import POLL_BYTES, UNREAD, Log, Reading, Source


def resumed_log(logs: Sequence[Log]) -> Log:
    """Return several logs of one format as one log. The last one is that of the latest start."""
    if len(logs) == 1:
        return logs[0]
    latest, opens = logs[-1], [log.open for log in logs]
    # The latest first: they tell by which files a log is known.
    files = tuple(path for log in reversed(logs) for path in log.files)
    return replace(
        latest,
        files=files,
        open=lambda: ResumedSource(opens),
        list_files=lambda: chain.from_iterable(
            log.files if log.list_files is None else log.list_files() for log in logs
        ),
    )


class ResumedSource:
    """Follows the sources of several starts in their order. The steps that a start repeats void those before it."""

    def __init__(self, opens: Sequence[Callable[[], Source]]) -> None:
        self._opens = opens
        self._begin()

    def _begin(self) -> None:
        self._sources = [open_source() for open_source in self._opens]
        self._last = [UNREAD for _ in self._sources]
        self._place = 0
        self._before: dict[str, tuple[int, int]] = {}
        """The lowest and highest step of each metric in the sources before the one that is read."""
        self._steps: dict[str, tuple[int, int]] = {}
        """Those in the one that is read."""
        self._has_begun = True
        """Whether the source that is read has had a metric that goes on."""

    def poll(self, max_bytes: int = POLL_BYTES) -> Reading:
        """Read at most about `max_bytes` of what is new: of a source once those before it have been read."""
        found = Reading()
        while True:
            last = self._last[self._place]
            reading = self._sources[self._place].poll(max_bytes)
            if reading.drop_from == -math.inf and self._place > 0:
                # The file was replaced, and what it had voided is to be read again.
                self._begin()
                return Reading(drop_from=-math.inf, total_bytes=1)
            self._last[self._place] = reading.progress()
            self._add(reading, found)
            num_read = max(reading.read_bytes - last.read_bytes, 0)
            max_bytes -= num_read
            if self._place + 1 == len(self._sources) or max_bytes <= 0 or (num_read and reading.share < 1):
                break
            self._next_source()
        problem = next((each.problem for each in self._last if each.problem is not None), None)
        return replace(
            found,
            read_bytes=sum(each.read_bytes for each in self._last),
            total_bytes=sum(each.total_bytes for each in self._last),
            problem=problem,
            has_ended=self._last[-1].has_ended,
        )

    def _next_source(self) -> None:
        self._place += 1
        for name, steps in self._steps.items():
            self._before[name] = _joined(self._before.get(name), *steps)
        self._steps, self._has_begun = {}, False

    def _add(self, reading: Reading, found: Reading) -> None:
        """Add a reading of the source that is read to what a poll has found."""
        found.parameters |= reading.parameters
        cuts = [] if reading.drop_from is None else [reading.drop_from]
        first = dict[str, int]()
        for point in reading.points:
            first.setdefault(point.name, point.step)
            self._steps[point.name] = _joined(self._steps.get(point.name), point.step)
        if not self._has_begun and (repeated := self._repeated(first)):
            self._has_begun = True
            cuts.append(min(repeated))
        if cuts:
            found.void_from(min(cuts))
        if found.points:
            found.points.extend(reading.points)
        else:
            found.points = reading.points

    def _repeated(self, first: dict[str, int]) -> list[int]:
        """Return the first steps of the metrics that an earlier source has.

        One that has a single step there, such as Lightning's `hp_metric`, may be written by every start.
        """
        known = {name: self._before[name] for name in first if name in self._before}
        going_on = any(low < high for low, high in self._before.values())
        return [first[name] for name, (low, high) in known.items() if low < high or not going_on]


def _joined(steps: tuple[int, int] | None, *others: int) -> tuple[int, int]:
    every = (*(steps or ()), *others)
    return min(every), max(every)
