"""Run a program in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios

from support.gputrain_command import Gputrain, wait_for

# Only detects a hang; no test measures time with it.
TIMEOUT_SECONDS = 60.0
# The escape sequences that leave the alternate screen and show the cursor.
LEAVE_ALTERNATE_SCREEN, SHOW_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A program that runs in its own pseudo-terminal."""

    def __init__(self, gputrain: Gputrain, *command: str, **variables: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(slave)

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = gputrain.start(
            *command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
            env=gputrain.environment | {"TERM": "xterm-256color"} | variables,
        )
        self.slave = slave
        self.seen = b""

    def read(self) -> None:
        while select.select([self.master], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self.master, 1 << 16)
            except OSError:
                return

    def wait_for(self, text: str) -> None:
        def appeared() -> bool:
            self.read()
            return text.encode() in self.seen

        wait_for(appeared, f"{text!r} on the terminal", TIMEOUT_SECONDS)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for_end(self) -> int:
        def has_ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_for(has_ended, "the end of the screen", TIMEOUT_SECONDS)
        return int(self.process.returncode)

    def restored(self) -> bool:
        self.read()
        return (
            self.seen.rfind(LEAVE_ALTERNATE_SCREEN) > 0
            and self.seen.rfind(SHOW_CURSOR) > 0
            and termios.tcgetattr(self.slave) == self.before
        )

    def hang_up(self) -> None:
        """Close the terminal, as the end of an SSH session does."""
        os.close(self.slave)
        os.close(self.master)
