"""Run a program in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios

from support.gputrain_command import Gputrain, wait_for
from support.screen.pseudo_terminal import ESCAPES

# Only detects a hang; no test measures time with it.
TIMEOUT_SECONDS = 60.0
LEAVE_ALTERNATE_SCREEN = b"\x1b[?1049l"
PRIVATE_MODE = re.compile(rb"\x1b\[\?(\d+)([hl])")
# DEC private modes that are set in a terminal at rest: line wrap, cursor.
MODES_AT_REST = {7, 25}
# A sequence that saves a state of the terminal, and the one that restores it: keyboard protocol of Kitty.
PAIRS = ((re.compile(rb"\x1b\[>\d+u"), b"\x1b[<u"),)


class Terminal:
    """A program that runs in its own pseudo-terminal."""

    def __init__(self, gputrain: Gputrain, *command: str, controlling: bool = True, **variables: str) -> None:
        """Start `command`. Without a controlling terminal, no SIGHUP tells it that the terminal is gone."""
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(slave)

        def take_terminal() -> None:
            if controlling:
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
        """Wait until `text` was drawn, or sent if it is an escape sequence."""

        def appeared() -> bool:
            self.read()
            return text.encode() in self.seen or text.encode() in ESCAPES.sub(b"", self.seen)

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
        """Whether the terminal is as before: its settings, and every mode that was changed."""
        self.read()
        modes = {int(mode): state == b"h" for mode, state in PRIVATE_MODE.findall(self.seen)}
        return (
            termios.tcgetattr(self.slave) == self.before
            and LEAVE_ALTERNATE_SCREEN in self.seen
            and all(state == (mode in MODES_AT_REST) for mode, state in modes.items())
            and all(len(save.findall(self.seen)) <= self.seen.count(restore) for save, restore in PAIRS)
        )

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal, as the end of an SSH session does."""
        os.close(self.slave)
        os.close(self.master)
