"""The terminal of a command: a pty of fixed size, or two pipes with `--no-tty`, and the lines of its output.

`engine.launch.program_run` passes the descriptors to `engine.command.process_tree`, waits until one is readable,
and calls `read`, which never blocks. Nobody types here: stdin is `/dev/null`, or in the foreground a pipe or file that
gputrain itself has as stdin. The pty is the controlling terminal, so a program finds its size at `/dev/tty`. To read
from it is to find its end: a program that asks for a password fails at once instead of waiting.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from engine.command.output_log import COLUMNS, ROWS, OutputLog

MAX_READ_BYTES = 1 << 16  # of one call: at most a tenth of a second of parsing, whatever the output is
MAX_LAST_BYTES = 1 << 20  # what a pipe may hold at the end; a daemon that keeps the terminal may write for ever
MAX_LAST_SECONDS = 2.0

Stream = Literal["terminal", "stdout", "stderr"]


def input_of_gputrain() -> int | None:
    """Return the stdin of this process if it is a pipe or a file, and not a terminal, a socket or `/dev/null`."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


class OutputLine(NamedTuple):
    """A line of output: printable text with SGR sequences, see `engine.utils.colors`."""

    text: str
    stream: Stream

    @property
    def log_text(self) -> str:
        """The line for `log.txt`: those of stderr, if it is apart from stdout, say so."""
        return f"stderr: {self.text}" if self.stream == "stderr" else self.text


class _Source:
    """Our end of a pty or of a pipe."""

    def __init__(self, fd: int, stream: Stream, clock: Callable[[], float]) -> None:
        os.set_blocking(fd, False)
        self.fd, self.stream, self.log = fd, stream, OutputLog(clock=clock)
        self.is_open = True

    def read(self, max_bytes: int) -> bytes:
        """Return what there is, at most `max_bytes`. The end closes it."""
        chunks: list[bytes] = []
        try:
            while max_bytes > 0:
                # A pty returns at most 4 KiB a call.
                chunk = os.read(self.fd, max_bytes)
                if not chunk:
                    self.close()
                    break
                chunks.append(chunk)
                max_bytes -= len(chunk)
        except BlockingIOError:
            pass
        except OSError as error:
            # The end of a pty: no process has the terminal open any more.
            if error.errno != errno.EIO:
                raise
            self.close()
        return b"".join(chunks)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self.fd)


class Terminal:
    """Descriptors and environment for a command, and the lines that it prints."""

    def __init__(self, *, tty: bool, stdin: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Open them. `stdin` is passed on to the command. Raises OSError, such as for a host without a free pty."""
        self.stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if stdin is None else os.dup(stdin)
        try:
            self._sources = self._open_pty(clock) if tty else self._open_pipes(clock)
        except BaseException:
            os.close(self.stdin)
            raise
        self.num_bytes = 0
        """How much the command has printed."""
        self.environment = {"PYTHONUNBUFFERED": "1"}
        """Variables of the command. Without a buffer, a Python program in a pipe shows what it prints."""
        if tty:
            # A pipe of the command, as with PET_TEE of torchrun, has no size.
            size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
            self.environment |= {"TERM": "xterm-256color", **size}

    def _open_pty(self, clock: Callable[[], float]) -> tuple[_Source, ...]:
        ours, self.stdout = os.openpty()
        self.stderr = self.stdout
        # Without output processing, newlines stay as the program writes them.
        modes = termios.tcgetattr(self.stdout)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        modes[6][termios.VMIN] = modes[6][termios.VTIME] = 0
        termios.tcsetattr(self.stdout, termios.TCSANOW, modes)
        # 132 columns, the wide mode of the VT100: a program cuts what does not fit, such as metrics behind a bar, and
        # that is lost, while a wider bar would not fit the log on a screen of 160 columns.
        # 48 rows: enough for the live display of a dozen ranks.
        fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        return (_Source(ours, "terminal", clock),)

    def _open_pipes(self, clock: Callable[[], float]) -> tuple[_Source, ...]:
        stdout, self.stdout = os.pipe()
        stderr, self.stderr = os.pipe()
        return _Source(stdout, "stdout", clock), _Source(stderr, "stderr", clock)

    def close_child_side(self) -> None:
        """Close the descriptors of the command once it has started, so that its end is noticed."""
        for fd in {self.stdin, self.stdout, self.stderr}:
            os.close(fd)

    @property
    def readable(self) -> list[int]:
        """Descriptors to wait for. None is left once all processes have closed the terminal."""
        return [source.fd for source in self._sources if source.is_open]

    def read(self) -> list[OutputLine]:
        """Return the lines that became final. Never blocks; call it also from time to time without output, because a
        line is final when it was left unchanged for a while."""
        lines = []
        for source in self._sources:
            data = source.read(MAX_READ_BYTES) if source.is_open else b""
            self.num_bytes += len(data)
            lines += [OutputLine(text, source.stream) for text in source.log.feed(data)]
        return lines

    def pending(self) -> list[OutputLine]:
        """Return the lines that may still change, such as a progress bar."""
        return [OutputLine(text, source.stream) for source in self._sources for text in source.log.pending()]

    def close(self) -> list[OutputLine]:
        """Return the last lines once the command has ended. A daemon that keeps writing is not waited for."""
        deadline, unread, lines = time.monotonic() + MAX_LAST_SECONDS, MAX_LAST_BYTES, []
        for source in self._sources:
            while source.is_open and unread > 0 and time.monotonic() < deadline:
                data = source.read(MAX_READ_BYTES)
                unread -= len(data)
                lines += [OutputLine(text, source.stream) for text in source.log.feed(data)]
                if not data:
                    break
            with suppress(OSError):
                source.close()
            lines += [OutputLine(text, source.stream) for text in source.log.close()]
        return lines
