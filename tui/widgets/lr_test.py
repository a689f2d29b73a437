"""The panel of a learning rate range test in the form: its loss over the learning rate, and what it suggests."""

from __future__ import annotations

from collections.abc import Sequence

from textual import work
from textual.message import Message

from engine.config.schema import Config
from engine.optim.lr_range import LrSuggestion
from engine.utils.errors import Problem
from engine.utils.units import format_number
from tui.charts.lr_range import VALLEY, range_test_curves, suggested_rates
from tui.charts.plot import Curve
from tui.form.lr_test import LrTest, LrTestResult, tested_values
from tui.widgets.chart import LEGEND_FORMATS, Chart

OTHER_VALUES = "for other values"


class LrTestChart(Chart):
    """Runs one test after another. It is hidden until the first one, and kills its process when it is removed."""

    class Ended(Message):
        """A test has ended by itself, with a suggestion or with an error."""

        def __init__(self, result: LrTestResult) -> None:
            self.result = result
            super().__init__()

    def __init__(self) -> None:
        super().__init__("LR test", "form-lr-test")
        # The input of the form keeps the focus.
        self.can_focus = False
        self.in_progress = False
        self._test: LrTest | None = None
        self._tested: object = None
        self._shown: object = None

    @property
    def suggestion(self) -> LrSuggestion | None:
        """What the last test suggests; None while it runs."""
        return None if self._test is None or self.in_progress else self._test.result.suggestion

    def start(self, arguments: Sequence[str], config: Config) -> None:
        """Start a test of a config; `arguments` are those of `gputrain run` that resolve to it."""
        self.stop()
        self._test, self._tested, self.in_progress = LrTest(arguments), tested_values(config), True
        self.add_class("-tested")
        self._follow(self._test)

    def stop(self) -> None:
        """Kill the test that runs, if there is one."""
        if self._test is not None and self.in_progress:
            self.in_progress = False
            self._test.cancel()

    def on_unmount(self) -> None:
        self.stop()

    @work(thread=True, group="lr-test", exit_on_error=False)
    def _follow(self, test: LrTest) -> None:
        test.follow()
        if self.is_attached:
            self.app.call_from_thread(self._end, test)

    def _end(self, test: LrTest) -> None:
        # Stopped, or replaced by another test.
        if test is self._test and self.in_progress:
            self.in_progress = False
            self.post_message(self.Ended(test.result))

    def show_result(self, config: Config | None) -> None:
        """Draw what the test has reported, and note whether it holds for a config; None if that cannot be read."""
        if self._test is None:
            return
        result, is_current = self._test.result, config is not None and tested_values(config) == self._tested
        shown = (len(result.curve.losses), result.status, result.suggestion, is_current, self.size)
        if shown != self._shown:
            self._shown = shown
            curves, window = range_test_curves(result.curve, result.suggestion)
            self.draw(curves, window, note="  ".join([result.status, *([] if is_current else [OTHER_VALUES])]))

    def _legend_part(self, curve: Curve, decimals: int) -> str:
        if curve.label == "loss":
            value = None if self.suggestion is not None else curve.series.latest()
            return "" if value is None else f"loss {format_number(value, 3)}"
        # The panel of a narrow terminal has room for one of the two.
        is_shown = decimals == LEGEND_FORMATS[0][0] or curve.label.startswith(VALLEY)
        return f"│ {curve.label}" if is_shown else ""


def describe_lr_test(result: LrTestResult) -> str | Problem:
    """Return what a test has found, and how to use it, or why it found nothing."""
    if result.error:
        return Problem("", f"Learning rate test: {result.error}", code="process-failed")
    if result.suggestion is None:
        reason = "Learning rate test: the loss does not fall; see `gputrain lr-find --help`"
        return Problem("", reason, code="no-suggestion")
    return f"Suggested learning rate: {format_number(result.suggestion.valley, 3)}; ^g sets it"


def next_suggestion(suggestion: LrSuggestion, current: str) -> tuple[str, str]:
    """Return name and text of the learning rate to use: the first one, or the second if the first is used."""
    rates = {name: format_number(lr, 3) for name, lr in suggested_rates(suggestion).items()}
    names = list(rates)
    name = names[1] if current == rates[names[0]] else names[0]
    return name, rates[name]
