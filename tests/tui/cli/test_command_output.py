"""The output of a command on a terminal: progress bars are drawn again in their place, and no sequence harms it."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import TypeVar

import pytest

from engine.jobs.command.output_log import OutputLog
from engine.runs.event_lines import CommandOutput
from engine.runs.events import WarningEvent
from tui.cli.command_output import OutputPrinter
from tui.cli.progress import PlainPrinter

T = TypeVar("T")
COLUMNS, ROWS = 40, 6


class Screen:
    """The terminal of this process, and what a person has seen on it."""

    def __init__(self) -> None:
        self._fd, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.stream = os.fdopen(terminal, "w", encoding="utf-8")
        self.written = ""

    def connect(self, printer: Callable[[], T]) -> T:
        """Return a printer whose stdout and stderr are this terminal."""
        with redirect_stdout(self.stream), redirect_stderr(self.stream):
            return printer()

    def rows(self) -> list[str]:
        """Return the lines of the terminal, as wide as they are."""
        os.set_blocking(self._fd, False)
        try:
            while data := os.read(self._fd, 1 << 16):
                self.written += data.decode()
        except BlockingIOError:
            pass
        log = OutputLog()
        lines = log.feed(self.written.encode())
        return [line for line in (*lines, *log.pending()) if line]

    def close(self) -> None:
        self.stream.close()
        os.close(self._fd)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    found = Screen()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    yield found
    found.close()


def bar(percent: int) -> str:
    return f"{percent:3d}%|{'█' * percent}{' ' * (100 - percent)}| {percent}/100 loss=0.5"


def show(printer: OutputPrinter, *pending: str, lines: tuple[str, ...] = ()) -> None:
    printer.print(CommandOutput(lines=[*lines], pending=pending))


def test_bar_is_drawn_again_in_its_place_and_fits_the_terminal(screen: Screen) -> None:
    printer = screen.connect(OutputPrinter)
    show(printer, bar(10), lines=("start",))
    first = screen.rows()
    show(printer, bar(50))
    assert [first[0], len(first)] == ["start", 2] and first[1].endswith("| 10/100 loss=0.5")
    assert len(screen.rows()) == 2 and screen.rows()[1].endswith("| 50/100 loss=0.5")
    assert all(len(row) <= COLUMNS for row in screen.rows())


def test_lines_are_printed_above_the_bars_and_final_bars_stay(screen: Screen) -> None:
    printer = screen.connect(OutputPrinter)
    show(printer, "outer 1", "inner 1")
    show(printer, "outer 1", "inner 2", lines=("a line",))
    assert screen.rows() == ["a line", "outer 1", "inner 2"]
    show(printer, lines=("outer 2",))
    assert screen.rows() == ["a line", "outer 2"]


def test_message_of_gputrain_is_printed_above_the_bar(screen: Screen) -> None:
    printer = screen.connect(PlainPrinter)
    printer(CommandOutput(lines=[], pending=("bar 1",)))
    printer(WarningEvent(message="the disk is full", code="not-recorded"))
    assert "the disk is full" in screen.rows()[0] and screen.rows()[1:] == ["bar 1"]
    printer(CommandOutput(lines=[], pending=("bar 2",)))
    assert screen.rows()[1:] == ["bar 2"]


def test_more_bars_than_rows_are_those_that_fit(screen: Screen) -> None:
    printer = screen.connect(OutputPrinter)
    for number in (1, 2):
        show(printer, *(f"bar {place} {number}" for place in range(ROWS + 4)))
    assert screen.rows() == [f"bar {place} 2" for place in range(5, ROWS + 4)]


def test_escape_sequences_of_a_bar_reach_no_terminal(screen: Screen) -> None:
    show(screen.connect(OutputPrinter), "\x1b]0;title\x07bar\x1b[2J\x1b[5A", "\x1b[31mred\x1b[0m")
    screen.rows()
    assert "\x1b]" not in screen.written and "\x07" not in screen.written and "\x1b[2J" not in screen.written


def test_pipe_gets_final_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    printer = OutputPrinter()
    show(printer, "bar 1", lines=("\x1b[31mred\x1b[0m",))
    show(printer, "bar 2")
    assert stream.getvalue() == "red\n"
