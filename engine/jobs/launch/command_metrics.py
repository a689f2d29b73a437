"""The metrics of a running command: found in its output and in its files, and kept in the record of the run.

`program_run` polls it. Reading is bounded, so that a command without metrics costs nearly nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from engine.base.colors import without_colors
from engine.base.errors import Problem
from engine.base.files import is_folder
from engine.base.process_table import ProcessId
from engine.base.text import printable
from engine.jobs.command.metric_files import FIRST_SECONDS, METRICS_FOLDER, OUTPUT_FILE, MetricFiles
from engine.jobs.command.metric_writer import MetricWriter, find_last_position
from engine.jobs.command.spec import Program
from engine.runs.foreign_record import by_importance, metric_keys
from engine.runs.recorder import Recorder
from engine.runs.sinks import Sink
from engine.watch.figures import Figures
from engine.watch.line_names import may_be_metric
from engine.watch.output_metrics import OutputMetrics
from engine.watch.parameters import Parameters
from engine.watch.run_list import FollowedRun
from engine.watch.user_patterns import PARSE_EXAMPLE

# With a tick per second, every second one. Lists and warnings need what is read; screens read the files themselves.
READ_SECONDS = 1.5
MAX_SHOWN_LINE = 120
# What is read after the end of the command.
MAX_LAST_SECONDS = 5.0


class RunningMetrics:
    """Finds the metrics of a command, and writes the last, lowest and highest value of each to the record."""

    def __init__(
        self,
        recorder: Recorder,
        command: Program,
        parameters: Parameters,
        started_at: float,
        warn: Callable[[Problem], None],
        members: Callable[[], Iterable[ProcessId]],
    ) -> None:
        """`members` returns the processes of the command. Raises UsageError for a pattern that cannot be used."""
        self._recorder, self._warn = recorder, warn
        # Wherever the folder is moved.
        run, cwd = recorder.opened.path, Path(command.cwd)
        output = run / METRICS_FOLDER / OUTPUT_FILE
        self._output = OutputMetrics(command.parse, find_last_position(output))
        self._writer = MetricWriter(output)
        self._files = MetricFiles(
            run,
            cwd=cwd,
            started_at=started_at,
            paths=[cwd / path for path in command.metrics],
            arguments=parameters,
            members=lambda: {member.pid for member in members()},
            open_output=self._writer.open,
        )
        self._followed = FollowedRun(self._files.metrics)
        self._sink = Sink("the metrics", lambda problem: self._report([problem]))
        self._next_read, self._cwd = time.monotonic(), cwd
        self._warned: set[Problem] = set()
        self._reported: set[str] = set()
        """Losses that are not finite."""
        self._unread = ""
        """The latest line of output that looks like a metric and is none."""

    @property
    def latest(self) -> Mapping[str, Figures]:
        """The last, lowest and highest value of each metric."""
        return self._followed.listed.metrics

    def add_lines(self, lines: Sequence[str], pending: Sequence[str]) -> None:
        """Find metrics in lines of output. `pending` are the lines below them that may still change."""
        below = [*map(without_colors, pending)] if lines else []
        for line in lines:
            text = without_colors(line)
            points = self._output.feed(text, below)
            self._writer.add(points)
            if not points and may_be_metric(text) and not self._output.is_holding:
                self._unread = text

    def poll(self, pending: Callable[[], Sequence[str]]) -> None:
        """Write what was found in the output, and read what is new in the files if it is time. To be called about once
        per second."""
        self._writer.add(self._output.feed_pending([*map(without_colors, pending())]))
        self._writer.poll()
        if time.monotonic() >= self._next_read:
            self._next_read = time.monotonic() + READ_SECONDS
            self._sink.attempt(self._follow)
            self._report(self._problems())

    def close(self) -> None:
        """Read the rest once the command has ended."""
        self._writer.add(self._output.finish())
        self._writer.close()
        self._sink.attempt(self._follow_rest, force=True)
        self._report(self._problems(is_over=True))

    def _problems(self, *, is_over: bool = False) -> Iterator[Problem]:
        """Yield why metrics may be missing."""
        yield from self._output.problems
        if self._writer.problem is not None:
            yield Problem("", self._writer.problem, code="not-recorded")
        if not is_over and not is_folder(self._cwd):
            reason = f"the working folder {self._cwd} was moved or deleted; metrics in its files are not found any more"
            yield Problem("", reason, "the metrics of the output are still recorded", code="not-recorded")
        if self._files.may_lack_files and (is_over or self._files.seconds > FIRST_SECONDS):
            reason = "no metric file was found, and the working folder is too large to be searched whole"
            yield Problem("", reason, "name the place of the files with --metrics PATH", code="too-large")
        if is_over and (notes := self._output.notes):
            yield Problem("", f"metrics of the output: {'; '.join(notes)}", code="merged")
        if is_over and self._unread and not self.latest:
            reason = f"no metrics were found; the line most like one is: {printable(self._unread[:MAX_SHOWN_LINE])}"
            yield Problem("", reason, f"name its number, such as {PARSE_EXAMPLE}", code="not-recorded")

    def _report(self, problems: Iterable[Problem]) -> None:
        """Warn once of each problem."""
        for problem in problems:
            if problem not in self._warned:
                self._warned.add(problem)
                self._warn(problem)

    def _follow(self) -> None:
        """Raises OSError."""
        self._followed.update(self._files.poll())
        self._read()

    def _follow_rest(self) -> None:
        """Raises OSError."""
        self._followed.update(self._files.close())
        self._read()
        deadline = time.monotonic() + MAX_LAST_SECONDS
        while self._followed.has_unread and time.monotonic() < deadline:
            self._read()

    def _read(self) -> None:
        before = self._followed.listed.metrics
        self._followed.check(time.time())
        if self._followed.has_unread:
            self._followed.read()
        if self._followed.listed.metrics is not before:
            self._recorder.set_metrics(self._followed.listed.metrics)
        for name, metric in self._followed.listed.metrics.items():
            # The first gradients of mixed precision overflow, and other metrics may have no value.
            if metric.odd_step is not None and "loss" in name.lower() and name not in self._reported:
                self._reported.add(name)
                reason = f"{printable(name)} is NaN or infinite at step {metric.odd_step}"
                self._warn(Problem("", reason, code="non-finite"))


def result_line(values: Mapping[str, Figures]) -> str:
    """Return the last value of the most important metric, by the name that the command has for it."""
    known = {key: name for name, key in metric_keys(values).items() if values[name].last is not None}
    first = next((known[key] for key in by_importance(known)), None)
    return "" if first is None else f"{first} {values[first].last:.4g}"
