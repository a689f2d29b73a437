"""A sink warns of an output that fails again and again, but not each time."""

from __future__ import annotations

import pytest

from engine.runs.sinks import RETRY_SECONDS, WARNING_INTERVAL_SECONDS, Sink
from engine.utils.errors import Problem


class FailingOutput:
    """A sink with a clock, whose output fails on request, and its warnings."""

    def __init__(self) -> None:
        self.now, self.warnings, self.is_handled = 0.0, list[Problem](), False
        self.sink = Sink("x", self.warnings.append, on_error=lambda _: self.is_handled, clock=lambda: self.now)

    def fail_and_recover(self) -> None:
        """Fail, and work again at the next attempt."""
        self.sink.attempt(self._fail)
        self.sink.attempt(lambda: pytest.fail("is switched off"))
        self.now += RETRY_SECONDS
        self.sink.attempt(lambda: None)

    @staticmethod
    def _fail() -> None:
        raise ValueError("no")

    def codes(self) -> list[str]:
        return [warning.code for warning in self.warnings]


def test_sink_warns_once_per_interval_of_output_that_fails_again_and_again() -> None:
    output = FailingOutput()
    while output.now < WARNING_INTERVAL_SECONDS:
        output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"]
    output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"] * 2


def test_sink_does_not_warn_of_handled_error() -> None:
    output = FailingOutput()
    output.is_handled = True
    output.fail_and_recover()
    assert output.codes() == []
    # An error that was handled before takes no place of a warning.
    output.is_handled = False
    output.fail_and_recover()
    assert output.codes() == ["switched-off", "recovered"]
