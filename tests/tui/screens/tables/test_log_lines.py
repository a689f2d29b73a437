"""Lines of a log as styled text."""

from __future__ import annotations

import pytest

from engine.runs.event_lines import event_line
from support.replace import replace
from support.runs.event_factories import make_epoch
from tui.screens.tables.log_lines import fit_bar, log_lines, output_line


def test_output_line_has_the_colors_of_the_output() -> None:
    text = output_line("a \x1b[1;31mred\x1b[38;5;208mor\x1b[0mb")
    assert text.plain == "a redorb"
    styles = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert styles == [("red", "bold color(1)"), ("or", "bold color(208)")]


def test_output_line_shows_markup_and_other_escapes_as_text() -> None:
    assert (
        output_line("[bold]x[/] \x1b[2J\x1b]8;;http://x\x1b\\y").plain == "[bold]x[/] \\x1b[2J\\x1b]8;;http://x\\x1b\\y"
    )


def test_output_line_expands_tabs() -> None:
    assert output_line("a\t\x1b[31mb").plain == "a       b"


def test_log_line_with_time_keeps_colors_behind_it() -> None:
    (text,) = log_lines(["2026-01-02 10:11:12  \x1b[32mok\x1b[0m"], [])
    assert text.plain == "10:11:12  ok"
    assert text.spans[-1].style == "color(2)"


@pytest.mark.parametrize(
    ("bar", "width", "fitted"),
    [
        ("a: 50%|█████████▌          | 5/10", 80, "a: 50%|█████████▌          | 5/10"),
        ("a: 50%|█████████▌          | 5/10", 23, "a: 50%|█████     | 5/10"),
        ("a:  0%|                    | 0/10", 19, "a:  0%|      | 0/10"),
        ("a: 50%|█████████▌          | 5/10", 16, "a: 50%|█████████▌          | 5/10"),
        ("a line without a bar", 10, "a line without a bar"),
    ],
)
def test_fit_bar_shortens_the_bar_and_keeps_the_figures(bar: str, width: int, fitted: str) -> None:
    assert fit_bar(output_line(bar), width).plain == fitted


def test_fit_bar_keeps_colors() -> None:
    text = fit_bar(output_line("\x1b[31ma\x1b[0m|██████████| \x1b[32m10\x1b[0m"), 10)
    assert text.plain == "a|████| 10"
    assert [text.plain[span.start : span.end] for span in text.spans] == ["a", "10"]


def test_log_line_of_an_epoch_without_accuracy_has_none() -> None:
    epoch = replace(make_epoch(2), train_accuracy=None, val_accuracy=None, metrics={"mae": 3.0})
    (text,) = log_lines([f"2026-01-02 10:11:12  {event_line(epoch)}"], [epoch])
    assert "val 0.5500   train 0.5000   mae 3.0000 " in text.plain
