"""The terminal of a command: a pty of fixed size, and the lines of its output.

`engine.jobs.launch.program_run` passes the descriptors to `engine.jobs.command.process_tree`, waits until it is
readable, and calls `read`, which never blocks. Nobody types here: stdin is `/dev/null`, or in the foreground a pipe or
file that gputrain itself has as stdin. The pty is the controlling terminal, so a program finds its size at `/dev/tty`.
To read from it is to find its end: a program that asks for a password fails at once instead of waiting.
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

from engine.jobs.command.output_log import COLUMNS, ROWS, OutputLog

MAX_READ_BYTES = 1 << 16  # of one call: at most a tenth of a second of parsing, whatever the output is
MAX_LAST_BYTES = 1 << 20  # a daemon that keeps the terminal may write for ever
MAX_LAST_SECONDS = 2.0


def input_of_gputrain() -> int | None:
    """Return the stdin of this process if it is a pipe or a file, and not a terminal, a socket or `/dev/null`."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else None


class Terminal:
    """Descriptors and environment for a command, and the lines that it prints: printable text with SGR sequences, see
    `engine.base.colors`."""

    def __init__(self, *, stdin: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Open it. `stdin` is passed on to the command. Raises OSError, such as for a host without a free pty."""
        self._ours, self.stdout = os.openpty()
        """`stdout` is also its stderr."""
        self.stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if stdin is None else os.dup(stdin)
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
        os.set_blocking(self._ours, False)
        self._log, self._is_open = OutputLog(clock=clock), True
        self.num_bytes = 0
        """How much the command has printed."""
        self.environment = {
            # A pipe of the command, as with PET_TEE of torchrun, has no size, and a buffer.
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": str(COLUMNS),
            "LINES": str(ROWS),
            "TERM": "xterm-256color",
        }
        """Variables of the command."""

    def close_child_side(self) -> None:
        """Close the descriptors of the command once it has started, so that its end is noticed."""
        os.close(self.stdin)
        os.close(self.stdout)

    def fileno(self) -> int | None:
        """Return the descriptor to wait for; None once all processes have closed the terminal."""
        return self._ours if self._is_open else None

    def read(self) -> list[str]:
        """Return the lines that became final. Never blocks; call it also from time to time without output, because a
        line is final when it was left unchanged for a while."""
        data = self._read_bytes()
        self.num_bytes += len(data)
        return self._log.feed(data)

    def _read_bytes(self) -> bytes:
        """Return what there is, at most `MAX_READ_BYTES`. The end closes the terminal."""
        chunks, left = list[bytes](), MAX_READ_BYTES
        try:
            while self._is_open and left > 0:
                # A pty returns at most 4 KiB a call.
                chunks.append(os.read(self._ours, left))
                left -= len(chunks[-1])
        except BlockingIOError:
            pass
        except OSError as error:
            # The end of a pty: no process has the terminal open any more.
            if error.errno != errno.EIO:
                raise
            self._close()
        return b"".join(chunks)

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._ours)

    def pending(self) -> list[str]:
        """Return the lines that may still change, such as a progress bar."""
        return self._log.pending()

    def close(self) -> list[str]:
        """Return the last lines once the command has ended. A daemon that keeps writing is not waited for."""
        deadline, unread, lines = time.monotonic() + MAX_LAST_SECONDS, MAX_LAST_BYTES, list[str]()
        while unread > 0 and time.monotonic() < deadline and (data := self._read_bytes()):
            unread -= len(data)
            lines += self._log.feed(data)
        self._close()
        return lines + self._log.close()
