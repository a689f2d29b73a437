"""A program in a pseudo-terminal of a chosen size: its output with the time of each piece, its keys and its CPU time.

For benchmarks and recordings, which need neither pytest nor a fixture. Tests use `terminal.py`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

READ_BYTES = 1 << 16
END_SECONDS = 3.0
ESCAPES = re.compile(rb"\x1b(\][^\x07\x1b]*(\x07|\x1b\\)|[P_^][^\x1b]*\x1b\\|\[[0-?]*[ -/]*[@-~]|[()][0-9A-Z]|.)")


class PseudoTerminal:
    """Start `command` in a terminal; leaving the context kills it and every process that it started."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        variables = dict(os.environ if environment is None else environment)
        variables |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.output: list[tuple[float, bytes]] = []
        """Seconds since the start, and the bytes that arrived then."""

    def read(self, seconds: float) -> bytes:
        """Read output for `seconds` and return it."""
        deadline, first = time.perf_counter() + seconds, len(self.output)
        while (left := deadline - time.perf_counter()) > 0:
            if not self._read_once(left):
                break
        return b"".join(data for _, data in self.output[first:])

    def _read_once(self, timeout_s: float) -> bool:
        """Wait for output. Return whether the program still runs."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self._master, READ_BYTES)
        except OSError:
            return False
        self.output.append((self.seconds_since_start(), data))
        return bool(data)

    def seconds_since_start(self) -> float:
        return time.perf_counter() - self.started

    def seconds_until(self, pattern: str, timeout_s: float = 60.0) -> float:
        """Return the seconds from the start until the output, without escape sequences, matches the pattern."""
        wanted, seen, position = re.compile(pattern.encode()), b"", 0
        while self.seconds_since_start() < timeout_s:
            for at, data in self.output[position:]:
                position += 1
                seen += data
                if wanted.search(ESCAPES.sub(b"", seen)):
                    return at
            if not self._read_once(0.5):
                break
        raise TimeoutError(f"{pattern!r} did not appear: {ESCAPES.sub(b'', seen)[-400:]!r}")

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def cpu_seconds(self) -> float:
        """CPU time of the program in seconds, without that of its children."""
        # Linux encodes the CPU clock of a process in its pid; it counts in nanoseconds, /proc/PID/stat in 10 ms.
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def close(self) -> None:
        for number in (signal.SIGHUP, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                deadline = time.monotonic() + END_SECONDS
                while self.process.poll() is None and time.monotonic() < deadline:
                    self.read(0.05)
        os.close(self._master)
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
