"""Find metrics in the output of a training, and the steps that they belong to.

`line_metrics` reads one line; this module knows the ranks, the tables and the counters of the lines before it.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from engine.command.line_metrics import (
    MAX_LINE_LENGTH,
    ParsedLine,
    is_held_out,
    may_have_metrics,
    parse_counter,
    parse_epoch_heading,
    parse_heading,
    parse_line,
    parse_row,
)
from engine.foreign.points import Point
from engine.foreign.reading import MAX_STEP, MetricNames, parse_number, to_step
from engine.utils.errors import Problem, UsageError
from engine.utils.text import printable

PARSE_EXAMPLE = "--parse 'loss[=: ]+(?P<loss>[0-9.eE+-]+)'"
MAX_SHOWN_PATTERN = 200
MAX_MATCH_SECONDS = 0.2  # of a pattern of the user, which may take exponential time
MAX_EPOCH = 1e9  # what is beyond it, or not finite, is no epoch
AXIS_GROUPS = ("step", "epoch")
# A progress bar is redrawn up to 20 times per second.
PENDING_SECONDS = 0.25
# torchrun's `[rank0]:` and `[default0]:`, `[train.py/0]:`, accelerate's `[RANK 0]`
_RANK = re.compile(
    r"\[(?!epoch|step|iter|batch)(?:[a-z_]{1,30} ?|[\w.-]{1,60}/)(?P<rank>\d{1,6})\]: ?|\[rank (?P<own>\d{1,6})\] ?",
    re.ASCII | re.IGNORECASE,
)
# srun --label
_LABEL = re.compile(r"\s{0,5}(\d{1,6}): ?")

_Axis = Literal["", "epoch", "count", "step"]


class OutputMetrics:
    """Finds metrics in lines of output.

    A line that a pattern of the user matches has the metrics of that pattern only. Hugging Face prints metrics without
    a step above the bar that counts the steps, so a line is read together with those below it.
    """

    def __init__(self, patterns: Sequence[str] = (), first_count: int = 0) -> None:
        """`first_count` is the step of the first line if lines without steps are counted: not 0 for a training that
        goes on. Raises UsageError for a pattern that cannot be used."""
        self._patterns = [_Pattern(pattern) for pattern in patterns]
        self.problems: list[Problem] = []
        """Patterns that were given up."""
        self._names = MetricNames()
        self._ranks = _Ranks()
        self._heading: list[str] | None = None
        self._epoch: float | None = None
        self._axis: _Axis = ""
        self._steps = _Counter()
        self._steps_per_epoch = math.inf
        self._has_bar = False
        """Whether the steps are those of a bar without metrics."""
        self._step, self._first_count = 0, first_count
        self._held_out: dict[str, float] = {}
        self._pending = Counter[str]()
        """The lines that were read before they are final."""
        self._next_pending = 0.0

    def feed(self, line: str, below: Sequence[str] = ()) -> list[Point]:
        """Return the points of a final line. `below` are the lines that may still change. The lines have no colors."""
        if self._pending[line]:
            self._pending[line] -= 1
            return []
        return self._read(line, below, is_final=True) or []

    def feed_pending(self, lines: Sequence[str]) -> list[Point]:
        """Return the points of lines that may still change, a few times per second at most."""
        now = time.monotonic()
        if now < self._next_pending:
            return []
        self._next_pending = now + PENDING_SECONDS
        return self.feed_drawn(lines)

    def feed_drawn(self, lines: Sequence[str]) -> list[Point]:
        """Return the points of lines that may still change."""
        points: list[Point] = []
        earlier, self._pending = self._pending, Counter()
        for index, line in enumerate(lines):
            if earlier[line]:
                earlier[line] -= 1
            elif (found := self._read(line, lines[index + 1 :], is_final=False)) is not None:
                points += found
            else:
                continue
            self._pending[line] += 1
        return points

    def _read(self, line: str, below: Sequence[str], *, is_final: bool) -> list[Point] | None:
        """Return the points of a line; None if it has none yet, because it is to be read again when it is final."""
        text = self._ranks.strip(line)
        parsed = self._parse(text) if text is not None else None
        if parsed is None:
            return [] if is_final or parse_counter(line) is None else None
        # Of a bar or a list of batches of a validation, the last line counts: the others are of a part of the data.
        if parsed.held_out and parsed.step is not None and parsed.total is not None:
            is_whole = parsed.step >= parsed.total - 1 if parsed.total else is_final
            if not is_whole:
                return None
        epoch = parsed.epoch if parsed.epoch is not None and abs(parsed.epoch) <= MAX_EPOCH else self._epoch
        step = self._find_step(parsed, epoch, below, is_final=is_final)
        if step is None or abs(step) > MAX_STEP:
            return None
        values = self._without_repeated(parsed)
        named = ((self._names.get(name), value) for name, value in values.items())
        return [Point(name, step, value, epoch) for name, value in named if name is not None]

    def _without_repeated(self, parsed: ParsedLine) -> dict[str, float]:
        """Return the values of a line without those of the latest validation, which a bar of Lightning repeats."""
        if parsed.total is None or parsed.held_out:
            return parsed.values
        held_out = {name: value for name, value in parsed.values.items() if is_held_out(name)}
        repeated = {name for name, value in held_out.items() if self._held_out.get(name) == value}
        self._held_out |= held_out
        return {name: value for name, value in parsed.values.items() if name not in repeated}

    def _parse(self, text: str) -> ParsedLine | None:
        for pattern in self._patterns.copy():
            try:
                if (parsed := pattern.parse(text)) is not None:
                    return parsed
            except TimeoutError:
                self._patterns.remove(pattern)
                reason = f"{pattern.shown} takes too long for a line, and is not used any more"
                self.problems.append(Problem("--parse", reason, code="timed-out"))
        if self._heading is not None and (row := parse_row(text, self._heading)) is not None:
            return row
        if may_have_metrics(text):
            if (heading := parse_heading(text)) is None:
                return parse_line(text)
            self._heading = heading
        elif (epoch := parse_epoch_heading(text)) is not None:
            self._epoch = epoch
        return None

    def _find_step(
        self, parsed: ParsedLine, epoch: float | None, below: Sequence[str], *, is_final: bool
    ) -> int | None:
        """Return the step of a line: its own, by a bar below it, its epoch, else the number of lines so far.

        None if a bar is to be expected, but is not below the line yet.
        """
        if parsed.step is not None and not parsed.held_out:
            self._axis, self._step, self._has_bar = "step", self._steps.count(parsed, epoch, is_final=is_final), False
        elif parsed.step is not None and parsed.total is None:
            return parsed.step
        elif self._axis == "step" and not self._has_bar:
            # The training has lines with steps. A bar below this line may be that of the next epoch.
            pass
        elif (step := self._step_by_bar(parsed, epoch, below)) is not None:
            self._axis, self._step, self._has_bar = "step", step, True
        elif epoch is not None and epoch == int(epoch) and self._axis in ("", "epoch"):
            self._axis, self._step = "epoch", int(epoch)
        elif epoch is not None and epoch != int(epoch) and not is_final:
            return None
        elif self._axis != "step" and not parsed.held_out and (epoch is None or self._axis != "epoch"):
            self._step = self._step + 1 if self._axis == "count" else self._step or self._first_count
            self._axis = "count"
        return self._step

    def _step_by_bar(self, parsed: ParsedLine, epoch: float | None, below: Sequence[str]) -> int | None:
        """Return the step that a bar below a line tells; None without one.

        The bar may be some steps ahead of the line, never behind, so the fewest steps per epoch are the right ones.
        """
        bar = next((count for line in below if (count := parse_counter(line)) is not None), None)
        if not parsed.has_exact_epoch:
            # A bar for each epoch tells no step: below the summary of an epoch is that of the next one.
            is_next = not bar or bar < self._step
            if epoch is None and self._has_bar and is_next:
                self._axis = "count"
            return bar if epoch is None and self._axis in ("", "step") and not is_next else None
        if not epoch:
            return bar
        if bar:
            self._steps_per_epoch = min(self._steps_per_epoch, bar / epoch)
        return round(epoch * self._steps_per_epoch) if self._steps_per_epoch < math.inf else None


class _Counter:
    """Makes one count of a counter that starts again in each epoch."""

    def __init__(self) -> None:
        self._base = 0
        self._step, self._total, self._epoch = 0, 0, None  # type: int, int, float | None
        self._is_over = False

    def count(self, parsed: ParsedLine, epoch: float | None, *, is_final: bool) -> int:
        """Return the step of a line that has one."""
        step, total = parsed.step or 0, parsed.total
        epochs = epoch - self._epoch if epoch is not None and self._epoch is not None else 0
        size = max(self._total, self._step)
        if epochs > 0 and (total is not None or step <= self._step):
            self._base += size
        elif epochs < 0:
            # The command has started again, from a checkpoint or from the beginning.
            self._base = max(self._base + int(epochs) * size, 0) if total is not None else 0
        elif total is not None and (step < self._step or (step == self._step and self._is_over)):
            self._base += size
        self._step, self._total, self._epoch = step, total or 0, epoch
        # The last state of a bar is seen twice: while it may change, and when it is final.
        self._is_over = is_final and total is not None and 0 < total <= step
        return self._base + step


class _Ranks:
    """Strips what launchers put before the lines of each rank. Only the lines of the lowest rank so far count."""

    def __init__(self) -> None:
        self._lowest: int | None = None
        self._is_labeled = True
        self._last_label: int | None = None
        self._has_labels = False

    def strip(self, line: str) -> str | None:
        """Return a line without its rank; None if it is that of another rank."""
        rank = _RANK.match(line)
        if rank is not None:
            return line[rank.end() :] if self._is_lowest(int(rank["rank"] or rank["own"])) else None
        label = _LABEL.match(line)
        if label is None:
            self._is_labeled = self._is_labeled and not line.strip()
            return line
        number = int(label[1])
        # A script may begin its lines with a step: that does not go back again and again.
        if self._is_labeled and self._last_label is not None and number < self._last_label:
            self._has_labels = True
        self._last_label = number
        if not (self._is_labeled and self._has_labels):
            return line
        return line[label.end() :] if self._is_lowest(number) else None

    def _is_lowest(self, rank: int) -> bool:
        if self._lowest is None or rank < self._lowest:
            self._lowest = rank
        return rank == self._lowest


# Patterns of the user


class _TimeLimit:
    """Ends a match that takes more than `MAX_MATCH_SECONDS` of CPU time: `re` looks for signals while it matches."""

    def __init__(self) -> None:
        self._is_installed, self._is_matching = False, False

    def search(self, compiled: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Return the first match. Raises TimeoutError. For the main thread."""
        if not self._is_installed:
            # Once: it takes 20 times as long as to set the timer.
            signal.signal(signal.SIGVTALRM, self._expire)
            self._is_installed = True
        self._is_matching = True
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_MATCH_SECONDS)
        try:
            return compiled.search(text)
        finally:
            self._is_matching = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def _expire(self, *_: object) -> None:
        if self._is_matching:
            raise TimeoutError


_TIME_LIMIT = _TimeLimit()  # of the process, as signals are


class _Pattern:
    """A pattern of `--parse`: its named groups are metrics, or the step and the epoch."""

    def __init__(self, pattern: str) -> None:
        self.shown = shown = printable(pattern[:MAX_SHOWN_PATTERN])
        try:
            self._compiled = re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            reason = f"{shown} is not a regular expression of Python: {error}"
            raise UsageError.one("--parse", reason, f"such as {PARSE_EXAMPLE}", code="invalid-value") from error
        if not set(self._compiled.groupindex).difference(AXIS_GROUPS):
            reason = f"{shown} has no named group for a metric"
            advice = f"name what is to be found, such as {PARSE_EXAMPLE}"
            raise UsageError.one("--parse", reason, advice, code="invalid-value")

    def parse(self, text: str) -> ParsedLine | None:
        """Return the values of the first match, None without one. Raises TimeoutError."""
        if len(text) > MAX_LINE_LENGTH:
            return None
        match = _TIME_LIMIT.search(self._compiled, text)
        if match is None:
            return None
        found = {name: value for name, group in match.groupdict().items() if (value := _number_of(group)) is not None}
        step, epoch = to_step(found.pop("step", None)), found.pop("epoch", None)
        return ParsedLine(found, step, None, epoch) if found else None


def _number_of(group: str | None) -> float | None:
    """Return the number of a group, without thousands separators and what ends a sentence."""
    return parse_number(group.replace(",", "").strip(" \t.%:;")) if group else None
