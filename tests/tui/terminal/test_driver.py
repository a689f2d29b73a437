"""What the threads of the driver do with bytes: output that is not read, and input of any value."""

from __future__ import annotations

import os
import queue
import select
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from support.gputrain_command import wait_for
from tui.terminal import driver as terminal_driver
from tui.terminal.driver import END_SIGNALS, InputFilter, Output, Watcher

LIMIT = 200_000


class Pipe:
    """A terminal that is read on request; `Output` writes to it."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self.drained = threading.Event()
        self.output = Output(self.writer, self.drained.set)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += os.read(self._reader, size - len(data))
        return data


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.setattr(terminal_driver, "MAX_PENDING_BYTES", LIMIT)
    yield Pipe()


def test_output_writes_in_order(pipe: Pipe) -> None:
    for text in (b"a", b"bc", b"d"):
        pipe.output.write(text)
    assert pipe.read(4) == b"abcd"
    pipe.output.flush(10)
    assert not pipe.drained.is_set()


def test_output_drops_whole_writes_beyond_limit_and_reports_when_drained(pipe: Pipe) -> None:
    for _ in range(2):
        pipe.output.write(b"a" * (LIMIT // 2))
    for _ in range(3):
        pipe.output.write(b"lost")
    assert pipe.read(LIMIT) == b"a" * LIMIT
    assert pipe.drained.wait(60)
    pipe.output.write(b"next")
    assert pipe.read(4) == b"next"


def test_output_takes_one_frame_of_any_size_between_others(pipe: Pipe) -> None:
    frame = b"begin" + b"a" * (2 * LIMIT) + b"end"
    for part in (frame[:5], frame[5:-3], frame[-3:]):
        pipe.output.write(part)
    assert pipe.read(len(frame)) == frame
    pipe.output.flush(10)
    assert not pipe.drained.is_set()
    for _ in range(2):
        pipe.output.write(b"b" * LIMIT)
    assert pipe.read(LIMIT) == b"b" * LIMIT
    assert pipe.drained.wait(60)


def test_output_writes_whole_to_non_blocking_terminal(pipe: Pipe) -> None:
    os.set_blocking(pipe.writer, False)
    pipe.output.write(b"a" * LIMIT)
    # The pipe holds less, and is read only once it is full.
    wait_for(lambda: not select.select([], [pipe.writer], [], 0)[1], "a full pipe")
    assert pipe.read(LIMIT) == b"a" * LIMIT


def test_output_discards_what_waits(pipe: Pipe) -> None:
    pipe.output.write(b"a" * (LIMIT // 2))
    # The thread holds the first write, which the pipe cannot take whole.
    wait_for(lambda: not pipe.output._pending, "the first write")
    pipe.output.write(b"frame")
    pipe.output.discard()
    pipe.output.write(b"last")
    assert pipe.read(LIMIT // 2 + 4).endswith(b"alast")


@pytest.mark.parametrize(
    ("pieces", "typed"),
    [
        ([b"a\xc3\xa9"], "aé"),
        ([b"a\xc3", b"\xa9b"], "aéb"),
        ([b"\xffa\x84"], "\ufffda\ufffd"),
        ([b"a\x1b[M C\x84b"], "ab"),
        ([b"a\x1b[M", b" C", b"\x84b"], "ab"),
        ([b"\x1b"], "\x1b"),
        ([b"\x1b[", b"A"], "\x1b[A"),
    ],
)
def test_input_filter_returns_valid_text_without_x10_mouse_reports(pieces: list[bytes], typed: str) -> None:
    source = InputFilter()
    assert "".join(map(source.feed, pieces)) == typed


def test_input_filter_releases_key_but_no_incomplete_mouse_report() -> None:
    source = InputFilter()
    assert (source.feed(b"\x1b["), source.holds, source.release(), source.holds) == ("", True, "\x1b[", False)
    assert (source.feed(b"\x1b[M "), source.release(), source.feed(b"a")) == ("", "", "a")


@pytest.fixture
def keep_signals() -> Iterator[None]:
    """Restore the handlers that a `Watcher` replaces."""
    handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("keep_signals")
def test_watcher_waits_for_no_input_that_was_discarded_since_it_arrived() -> None:
    """Else it would see no signal before the next key."""
    master, slave = os.openpty()
    # What is overdue ends the process, here the thread.
    watcher = Watcher(slave, lambda _: None, lambda _: None, sys.exit)
    watcher.start_reading()
    reading = threading.Thread(target=watcher._read, daemon=True)
    reading.start()
    reading.join(10)
    is_blocked = reading.is_alive()
    os.close(master)
    assert not is_blocked


@pytest.mark.usefixtures("keep_signals")
def test_watcher_leaves_ctrl_c_to_the_program_that_has_the_terminal() -> None:
    master, slave = os.openpty()
    ended: queue.Queue[int] = queue.Queue()
    watcher = Watcher(slave, lambda _: None, ended.put, sys.exit)
    os.kill(os.getpid(), signal.SIGINT)
    assert watcher.received is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.get(timeout=10) == signal.SIGTERM
    os.close(master)
