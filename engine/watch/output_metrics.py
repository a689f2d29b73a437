"""Find metrics in the output of a training, and the steps that they belong to.

`line_metrics` reads one line; this module knows the ranks, the tables and the counters of the lines before it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Literal

from engine.base.errors import Problem
from engine.watch.line_metrics import (
    MAX_FREE_NUMBERS,
    MAX_LINE_LENGTH,
    MAX_NUMBERS,
    Candidate,
    LineParser,
    ParsedLine,
)
from engine.watch.line_names import is_held_out, with_source
from engine.watch.line_plan import Context
from engine.watch.output_lines import JoinedLines
from engine.watch.output_ranks import PrintedRanks
from engine.watch.output_tables import CELL_IN_ROW, Tables
from engine.watch.points import Point
from engine.watch.reading import MAX_STEP, MetricNames
from engine.watch.user_patterns import UserPattern

# A progress bar is redrawn up to 20 times per second.
PENDING_SECONDS = 0.25
MAX_RECORD_LINES = 64  # below a position
LEARNED_LINES = (4, 3)  # until unknown names are metrics: without a position, and with one
# LightGBM's `Early stopping, best iteration is:`
_RECAP = re.compile(r"\bbest\b[^:]{0,60}:\s*$", re.IGNORECASE)
# tqdm: `12/100 [00:01<00:08, `
_BAR = re.compile(r"(?P<count>\d{1,12})(?:/\d{1,12}|it) \[\d{2,3}:\d{2}")
_Axis = Literal["", "epoch", "count", "step"]


class OutputMetrics:
    """Finds metrics in lines of output.

    A line that a pattern of the user matches has the metrics of that pattern only. Hugging Face prints metrics without
    a step above the bar that counts the steps, so a line is read together with those below it.
    """

    def __init__(self, patterns: Sequence[str] = (), last: tuple[int, float | None] | None = None) -> None:
        """`last` is the last step and epoch of a training that goes on. Raises UsageError for a pattern that cannot be
        used."""
        self._patterns = [UserPattern(pattern) for pattern in patterns]
        self.problems: list[Problem] = []
        """Patterns that were given up."""
        self._names = MetricNames()
        self._ranks = PrintedRanks()
        self._parser, self._joined, self._tables = LineParser(), JoinedLines(), Tables()
        self._source = ""
        """What a heading says that the lines below it were measured on."""
        self._has_partial = self._has_summary = False
        """`_has_partial`: batches of a validation were skipped. `_has_summary`: a metric is named `summary/NAME`."""
        self._record_lines = self._block_lines = 0
        """Lines that may still belong to the latest position, and to the block below a heading."""
        self._skips_next = False
        self._last_batch: list[Point] = []
        """The points of what may be the last batch of a validation."""
        self._candidates: dict[str, list[tuple[tuple[float, float], list[Point]]]] = {}
        """The counters and the points of lines with unknown names, by these names."""
        self._kinds: dict[str, tuple[int, Set[str], bool]] = {}
        """The step of the latest value of each metric, the names of its line, and whether the line had that step."""
        self._epoch: float | None = None
        self._axis: _Axis = ""
        self._steps = _Counter(last)
        self._exact_epoch: float | None = None
        """The epoch of the latest line that names it with its fraction, where the lines are counted."""
        self._heading_name = ""
        """The word before the step of headings."""
        self._loop: tuple[float | None, int, bool] = (None, 0, False)
        """The epoch, the total of its first counter, and whether that is over."""
        self._has_bar = False
        """Whether the steps are those of a bar without metrics."""
        self._step, self._first_count = 0, 0 if last is None else last[0] + 1
        self._held_out: dict[str, float] = {}
        self._pending = Counter[str]()
        """The lines that were read before they are final."""
        self._next_pending = 0.0

    @property
    def notes(self) -> list[str]:
        """Which lines were skipped, and which metrics were renamed."""
        notes = {
            f"what has more than {MAX_LINE_LENGTH:,} characters, {MAX_NUMBERS} numbers, or {MAX_FREE_NUMBERS} that are"
            " not NAME=NUMBER in a line was left out": self._parser.has_skipped,
            "lines of other ranks or workers were left out": self._ranks.has_skipped,
            "of the batches of a validation, only the last one counts": self._has_partial,
            "what another line says of the same step is summary/NAME": self._has_summary,
        }
        return [note for note, is_true in notes.items() if is_true]

    @property
    def is_holding(self) -> bool:
        """Whether the latest lines belong to a record that is not whole."""
        return self._joined.is_holding

    def feed(self, line: str, below: Sequence[str] = ()) -> list[Point]:
        """Return the points of a final line. `below` are the lines that may still change. The lines have no colors."""
        if self._pending and self._pending[line]:
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
            else:
                found = self._read(line, lines[index + 1 :], is_final=False)
                if found is None or (not found and _parse_counter(line) is not None):
                    # It is to be read again when it is final.
                    continue
                points += found
            self._pending[line] += 1
        return points

    def finish(self) -> list[Point]:
        """Return the points of a record that the end of the output has ended."""
        points = self._points_of_lines(self._joined.end(), (), is_final=True) or []
        last_batch, self._last_batch = self._last_batch, []
        return points + last_batch

    def _read(self, line: str, below: Sequence[str], *, is_final: bool) -> list[Point] | None:
        """Return the points of a line. Most lines differ from an earlier one in digits only, and mean the same."""
        heading, parsed = self._tables.heading, None
        is_plain = not (self._block_lines or self._skips_next or self._joined.is_holding)
        if is_plain:
            if not line and heading is None:
                self._record_lines = max(self._record_lines - 1, 0)
                return []
            parsed = self._parser.recall(line, heading or ("record" if self._record_lines else ""))
        if parsed is None:
            points = self._points_of_lines(self._whole_lines(line), below, is_final=is_final)
            is_same = heading is self._tables.heading and (heading is None or not self._tables.num_other)
            if is_plain and is_same and not (self._patterns or self._ranks.may_be_labeled):
                self._parser.remember(line)
            return points
        if heading is not None:
            self._tables.num_other = 0
        else:
            has_position = parsed.step is not None or parsed.epoch is not None
            self._record_lines = MAX_RECORD_LINES if has_position else max(self._record_lines - 1, 0)
        return self._points_of_line(parsed, below, is_final=is_final)

    def _whole_lines(self, line: str) -> Iterator[str | ParsedLine]:
        """Return the lines that are whole now, or what the pattern of the user that matches a line finds."""
        for text in self._ranks.strip(line):
            if self._patterns and (matched := self._match(text)) is not None:
                yield matched
            else:
                yield from self._joined.add(text, may_be_block=not self._block_lines)

    def _points_of_lines(
        self, lines: Iterable[str | ParsedLine], below: Sequence[str], *, is_final: bool
    ) -> list[Point] | None:
        points: list[Point] | None = []
        for line in lines:
            parsed = self._parse(line) if isinstance(line, str) else line
            if parsed is not None:
                found = self._points_of_line(parsed, below, is_final=is_final)
                points = (points or None) if found is None else (points or []) + found
        return points

    def _points_of_line(self, parsed: ParsedLine, below: Sequence[str], *, is_final: bool) -> list[Point] | None:
        if parsed.rank is not None and not self._ranks.counts(parsed.rank):
            return []
        if parsed.values:
            return self._points_of(parsed, below, is_final=is_final)
        self._note_heading(parsed, is_final=is_final)
        return []

    def _learn(self, candidate: Candidate, points: list[Point]) -> list[Point]:
        """Return the points of lines of one shape with unknown names, once there are some whose steps grow."""
        known = self._candidates.setdefault(candidate.names, [])
        if known and candidate.counter <= known[-1][0]:
            known.clear()
        known.append((candidate.counter, points))
        if len(known) < LEARNED_LINES[candidate.is_position]:
            return []
        self._parser.learn(candidate)
        return [point for _, each in self._candidates.pop(candidate.names) for point in each]

    def _points_of(self, parsed: ParsedLine, below: Sequence[str], *, is_final: bool) -> list[Point] | None:
        if self._source or parsed.held_out:
            self._inherit_source(parsed)
        if parsed.total:
            self._note_loop(parsed)
        has_own_counter = parsed.held_out and self._has_own_counter(parsed)
        # Of a bar or a list of batches of a validation, the last line counts: the others are of a part of the data.
        if has_own_counter and parsed.step is not None:
            is_whole = parsed.step >= (parsed.total or 0) - 1 if parsed.total else is_final
            if not is_whole:
                self._has_partial = True
                return None
            parsed.values |= {name: value for name, value in parsed.averages.items() if name in parsed.values}
        if parsed.epoch is not None and not (parsed.has_exact_epoch or has_own_counter):
            self._epoch = parsed.epoch
        epoch = self._epoch if parsed.epoch is None else parsed.epoch
        step = self._find_step(parsed, epoch, below, is_final=is_final, has_own_counter=has_own_counter)
        if step is None or abs(step) > MAX_STEP:
            return None
        # The last one if the batches count from zero: a summary may take its place.
        is_last_batch = has_own_counter and parsed.total == (parsed.step or 0) + 1
        points = self._named_points(parsed, step, epoch, is_last_batch=is_last_batch)
        before, self._last_batch = self._last_batch, points if is_last_batch else []
        if is_last_batch:
            return []
        if before and not has_own_counter:
            is_summary = parsed.held_out and parsed.step is None
            # It may lack some, as the loss.
            lacking = [point for point in before if not is_summary or point.name not in parsed.values]
            points = lacking + points
        return self._learn(parsed.candidate, points) if parsed.candidate else points

    def _has_own_counter(self, parsed: ParsedLine) -> bool:
        """Whether the step of a line counts the batches of a validation."""
        return (
            parsed.step is not None
            and parsed.total is not None
            and (parsed.source != "" or not (parsed.step_name or self._steps.total in (0, parsed.total)))
        )

    def _inherit_source(self, parsed: ParsedLine) -> None:
        """Add what a heading or the batches of a validation said of the lines below them."""
        if parsed.held_out and parsed.source:
            # A line that has all of its validation says nothing of the next one.
            self._source = parsed.source if self._has_own_counter(parsed) else ""
        elif parsed.is_training or parsed.step is not None or parsed.epoch is not None or not self._source:
            self._source = ""
        elif not any(map(is_held_out, parsed.values)):
            parsed.values = {f"{self._source}/{name}": value for name, value in parsed.values.items()}
            parsed.held_out = True

    def _note_loop(self, parsed: ParsedLine) -> None:
        """Take a second counter with another total, in the same epoch, as that of an evaluation."""
        epoch, total, is_over = self._loop
        line_epoch = self._epoch if parsed.epoch is None else parsed.epoch
        if not parsed.total or parsed.step is None or line_epoch is None or parsed.held_out:
            return
        if line_epoch != epoch:
            self._loop = (line_epoch, parsed.total, parsed.step >= parsed.total - 1)
        elif total == parsed.total:
            self._loop = (epoch, total, is_over or parsed.step >= total - 1)
        elif is_over:
            parsed.source, parsed.held_out = "eval", True
            parsed.values = {with_source(name, "eval"): value for name, value in parsed.values.items()}

    def _note_heading(self, parsed: ParsedLine, *, is_final: bool) -> None:
        """Take the position of a heading for the lines below it, and what they are measured on."""
        self._record_lines = self._block_lines = MAX_RECORD_LINES
        self._source = parsed.source
        if parsed.source and (parsed.total is not None or not parsed.step_name):
            return
        if parsed.epoch is not None:
            self._epoch = parsed.epoch
        if parsed.step is not None and parsed.step_name and self._heading_name in ("", parsed.step_name):
            self._heading_name = parsed.step_name
            self._axis, self._step, self._has_bar = (
                "step",
                self._steps.count(parsed, self._epoch, is_final=is_final),
                False,
            )

    def _without_repeated(self, parsed: ParsedLine) -> dict[str, float]:
        """Return the values of a line without those of the latest validation, which a bar of Lightning repeats."""
        if parsed.held_out:
            return parsed.values
        held_out = {name: value for name, value in parsed.values.items() if is_held_out(name)}
        repeated = {name for name, value in held_out.items() if self._held_out.get(name) == value}
        self._held_out |= held_out
        return {name: value for name, value in parsed.values.items() if name not in repeated}

    def _named_points(self, parsed: ParsedLine, step: int, epoch: float | None, *, is_last_batch: bool) -> list[Point]:
        """Return the points of a line, under other names those that lines of another kind have for the same step: the
        mean of an epoch is no point of the curve of its steps."""
        points, latest = list[Point](), (step, parsed.values.keys(), parsed.step is not None)
        may_be_again = parsed.total is None and not is_last_batch
        for name, value in (parsed.values if parsed.total is None else self._without_repeated(parsed)).items():
            before = self._kinds.get(name, latest)
            is_summary = False
            if may_be_again and before is not latest and before[0] == step:
                is_summary = before[1] != latest[1] or before[2] > latest[2]
                self._has_summary = self._has_summary or is_summary
            if not (is_summary or is_last_batch):
                self._kinds[name] = latest
            if (known := self._names.get(f"summary/{name}" if is_summary else name)) is not None:
                points.append(Point(known, step, value, epoch))
        return points

    def _match(self, text: str) -> ParsedLine | None:
        """Return what the first pattern of the user that matches a line finds."""
        for pattern in self._patterns.copy():
            try:
                if (parsed := pattern.parse(text)) is not None:
                    return parsed
            except TimeoutError:
                self._patterns.remove(pattern)
                reason = f"{pattern.shown} takes too long for a line, and is not used any more"
                self.problems.append(Problem("--parse", reason, code="timed-out"))
        return None

    def _parse(self, text: str) -> ParsedLine | None:
        if (row := self._tables.read(text)) is not None:
            return self._parser.read_row(text, *row, CELL_IN_ROW)
        context: Context = ""
        if self._record_lines:
            self._record_lines -= 1
            is_below = self._block_lines > 0 and text[:1].isspace()
            self._block_lines = max(self._block_lines - 1, 0) if is_below or not text.strip() else 0
            context = "block" if is_below else "record"
        line = self._parser.parse(text, context)
        if (line is None or not line.values) and self._tables.is_heading(text):
            return None
        if text.endswith((":", ": ")) and _RECAP.search(text) is not None:
            self._skips_next = True
        elif self._skips_next and line is not None and line.values:
            # What is below `best iteration is:` was there before.
            self._skips_next = False
            return None
        if line is not None and line.values and (line.step is not None or line.epoch is not None):
            self._record_lines = MAX_RECORD_LINES
        return line

    def _find_step(
        self,
        parsed: ParsedLine,
        epoch: float | None,
        below: Sequence[str],
        *,
        is_final: bool,
        has_own_counter: bool = False,
    ) -> int | None:
        """Return the step of a line: its own, by a bar below it, its epoch, else the number of lines so far.

        None if a bar is to be expected, but is not below the line yet.
        """
        if parsed.step is not None and not has_own_counter and not (parsed.held_out and parsed.total is None):
            self._axis, self._step, self._has_bar = "step", self._steps.count(parsed, epoch, is_final=is_final), False
        elif parsed.step is not None and parsed.total is None:
            return parsed.step
        elif self._axis == "step" and not self._has_bar:
            # The training has lines with steps. A bar below this line may be that of the next epoch.
            pass
        elif parsed.has_exact_epoch and epoch is not None and (epoch != int(epoch) or self._axis == "count"):
            # The epoch is the position: a bar is redrawn at times of its own, and may be ahead of the line or behind.
            if epoch != self._exact_epoch or self._is_known(parsed, self._step):
                self._step = self._first_count if self._axis == "" else self._step + 1
            self._axis, self._exact_epoch = "count", epoch
        elif not parsed.has_exact_epoch and (step := self._step_by_bar(epoch, below)) is not None:
            self._axis, self._step, self._has_bar = "step", step, True
        elif (
            epoch is not None
            and epoch == int(epoch)
            and self._axis in ("", "epoch")
            and not (parsed.epoch is None and not parsed.held_out and self._is_known(parsed, int(epoch)))
        ):
            self._axis, self._step = "epoch", int(epoch)
        elif self._axis != "step" and not parsed.held_out and (parsed.epoch is None or self._axis != "epoch"):
            is_next = self._axis == "count" or self._is_known(parsed, self._step)
            self._step = self._step + 1 if is_next else self._step or self._first_count
            self._axis = "count"
        return self._step

    def _is_known(self, parsed: ParsedLine, step: int) -> bool:
        """Whether a metric of a line has had a value for a step."""
        return any(name in self._kinds and self._kinds[name][0] == step for name in parsed.values)

    def _step_by_bar(self, epoch: float | None, below: Sequence[str]) -> int | None:
        """Return the step that a bar below a line tells; None without one.

        A bar for each epoch tells no step: below the summary of an epoch is that of the next one.
        """
        bar = next((count for line in below if (count := _parse_counter(line)) is not None), None)
        is_next = not bar or bar < self._step
        if epoch is None and self._has_bar and is_next:
            self._axis = "count"
        return bar if epoch is None and self._axis in ("", "step") and not is_next else None


def _parse_counter(text: str) -> int | None:
    """Return how far a progress bar is; None if the line is none."""
    match = _BAR.search(text) if len(text) <= MAX_LINE_LENGTH else None
    return int(match["count"]) if match is not None else None


class _Counter:
    """Makes one count of a counter that starts again in each epoch."""

    def __init__(self, last: tuple[int, float | None] | None) -> None:
        self._last = last
        """The last position of an earlier start."""
        self._base = 0
        self.total = 0
        """The total of the latest line; 0 if it had none."""
        self._step, self._epoch = 0, None  # type: int, float | None
        self._is_over = False

    def count(self, parsed: ParsedLine, epoch: float | None, *, is_final: bool) -> int:
        """Return the step of a line that has one."""
        step, total = parsed.step or 0, parsed.total
        if self._last is not None and total and epoch is not None and self._last[1] is not None:
            # The last step of an epoch is its total.
            done = max(self._last[0] - 1, 0) // total * total
            self._base = max(done + int(epoch - self._last[1]) * total, 0)
        self._last = None
        epochs = epoch - self._epoch if epoch is not None and self._epoch is not None else 0
        # Without a total, the first step of an epoch that counts from zero is not the last one before it.
        size = max(self.total, self._step + (step == 0 and not self.total))
        if epochs > 0 and (total is not None or step <= self._step):
            self._base += size
        elif epochs < 0:
            # The command has started again, from a checkpoint or from the beginning.
            self._base = max(self._base + int(epochs) * size, 0) if total is not None else 0
        elif total is not None and (step < self._step or (step == self._step and self._is_over)):
            self._base += size
        self._step, self.total, self._epoch = step, total or 0, epoch
        # The last state of a bar is seen twice: while it may change, and when it is final.
        self._is_over = is_final and total is not None and 0 < total <= step
        return self._base + step
