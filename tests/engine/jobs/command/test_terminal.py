"""The terminal of a real command: what the command sees, and which lines are read from it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from engine.jobs.command.terminal import MAX_LAST_BYTES, MAX_LAST_SECONDS, MAX_READ_BYTES, Terminal

WAIT_SECONDS = 30


@contextmanager
def started(terminal: Terminal, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        argv,
        stdin=terminal.stdin,
        stdout=terminal.stdout,
        stderr=terminal.stdout,
        env=os.environ | terminal.environment,
        start_new_session=True,
    )
    terminal.close_child_side()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def output_of(argv: list[str]) -> list[str]:
    terminal = Terminal()
    lines = []
    with started(terminal, argv):
        while (readable := terminal.fileno()) is not None:
            assert select.select([readable], [], [], WAIT_SECONDS)[0]
            lines += terminal.read()
    return lines + terminal.close()


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_command_sees_a_terminal_of_fixed_size_and_no_input() -> None:
    code = "import os, sys; print(os.get_terminal_size(1), os.isatty(2), os.environ['TERM'], repr(sys.stdin.read()))"
    (line,) = output_of(python(code))
    assert line == "os.terminal_size(columns=132, lines=48) True xterm-256color ''"


def test_daemon_that_keeps_the_terminal_does_not_delay_the_end() -> None:
    terminal = Terminal()
    with started(terminal, ["sh", "-c", "setsid sleep 60 & echo $!"]) as process:
        process.wait(WAIT_SECONDS)
        began = time.monotonic()
        (line,) = terminal.close()
        assert time.monotonic() - began < MAX_LAST_SECONDS
        os.kill(int(line), 9)
    assert terminal.fileno() is None


def test_endless_output_is_read_in_bounded_parts_and_ends() -> None:
    terminal = Terminal()
    with started(terminal, ["yes"]):
        assert select.select([terminal], [], [], WAIT_SECONDS)[0]
        assert len(terminal.read()) <= MAX_READ_BYTES // len("y\n")
        # It still runs.
        assert len(terminal.close()) <= MAX_LAST_BYTES


def test_all_lines_of_fast_output_arrive_in_order() -> None:
    lines = output_of(["seq", "20000"])
    numbers = [int(line) for line in lines]
    assert len(numbers) == 20000
    assert all(after == before + 1 for before, after in pairwise(numbers))
