"""The patterns of `--parse`: regular expressions whose named groups are metrics, or the step and the epoch."""

from __future__ import annotations

import re
import signal

from engine.base.errors import UsageError
from engine.base.text import printable
from engine.watch.line_metrics import MAX_LINE_LENGTH, ParsedLine
from engine.watch.reading import parse_cell, to_epoch, to_step

PARSE_EXAMPLE = "--parse 'loss[=: ]+(?P<loss>[0-9.eE+-]+)'"
MAX_SHOWN_PATTERN = 200
MAX_MATCH_SECONDS = 0.2  # of a pattern of the user, which may take exponential time
AXIS_GROUPS = ("step", "epoch")


class TimeLimit:
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


_TIME_LIMIT = TimeLimit()  # of the process, as signals are


class UserPattern:
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
        # What ends a sentence is no part of a number.
        groups = {name: (group or "").strip(" \t,:;").rstrip(".") for name, group in match.groupdict().items()}
        found = {name: value for name, group in groups.items() if (value := parse_cell(group)) is not None}
        step, epoch = to_step(found.pop("step", None)), to_epoch(found.pop("epoch", None))
        return ParsedLine(found, step, None, epoch) if found else None
