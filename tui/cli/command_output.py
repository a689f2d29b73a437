"""Print the output of a command to stdout: final lines, and on a terminal the lines that may still change below them.

`tui.cli.progress` passes it the events, and hides the changing lines while it prints lines of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import IO, TYPE_CHECKING, Any, cast

from engine.base.colors import with_colors, without_colors
from engine.runs.event_lines import CommandOutput
from tui.cli.terminal import moves_cursor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class DisconnectSafeStream:
    """A stream that discards writes after its terminal or pipe has closed, so that the run continues."""

    def __init__(self, stream: IO[str] | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):
            return cast(IO[str], self._stream).write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            cast(IO[str], self._stream).flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class OutputPrinter:
    """Prints the output of a command, with its colors if stdout is a terminal.

    A progress bar is drawn again in its place. Every line passes through `engine.base.colors`, so no other escape
    sequence of the command reaches the terminal."""

    def __init__(self) -> None:
        self._out = DisconnectSafeStream(sys.stdout)
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._is_live = self._is_terminal and moves_cursor()
        self._pending: Sequence[str] = ()
        self._num_drawn = 0
        """Rows of the terminal that have changing lines, above the cursor."""

    def print(self, event: CommandOutput) -> None:
        """Print the lines of an event, and the changing lines of it in place of those before."""
        self._pending = event.pending if self._is_live else ()
        self._write(self._erased() + "".join(f"{self._line(line)}\n" for line in event.lines) + self._drawn())

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the changing lines while others are printed."""
        if not self._num_drawn:
            yield
            return
        self._write(self._erased())
        yield
        self._write(self._drawn())

    def _line(self, line: str) -> str:
        if not self._is_terminal:
            return without_colors(line)
        # The command sees a terminal of 132 columns, which its bars fill.
        return self._fitted(line) if len(line) > self._size.columns and "█" in line else with_colors(line)

    def _erased(self) -> str:
        count, self._num_drawn = self._num_drawn, 0
        return f"\r\x1b[{count}A\x1b[J" if count else ""

    def _drawn(self) -> str:
        # What has left the top of the terminal cannot be drawn again. The cursor is below, where ^C wraps no line and a
        # shell prints its prompt if this process is killed.
        lines = self._pending[-max(self._size.lines - 1, 1) :] if self._pending else ()
        self._num_drawn = len(lines)
        return "".join(f"{self._fitted(line, crop=True)}\n" for line in lines)

    def _fitted(self, line: str, *, crop: bool = False) -> str:
        """Return a line for this terminal, with its bar shortened. With `crop`, it takes one row."""
        from tui.screens.tables.log_lines import fit_bar, output_line

        width = self._size.columns
        text: Text = fit_bar(output_line(line), width)
        if crop:
            text.truncate(width, overflow="ellipsis")
        with self._console.capture() as captured:
            self._console.print(text, soft_wrap=True, end="")
        return captured.get()

    @property
    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            size = os.terminal_size((0, 0))
        # A serial console has no size.
        return os.terminal_size((size.columns or 80, size.lines or 24))

    @cached_property
    def _console(self) -> Console:
        # Most commands draw no bar, and Rich takes 50 ms to import.
        from rich.console import Console

        return Console(file=cast(IO[str], self._out), force_terminal=True, highlight=False)

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
