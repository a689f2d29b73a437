"""The driver of the terminal: output that blocks nobody, input that is always valid, and an end that always comes.

`tui.terminal.app` runs on it. It extends Textual's driver for Linux at its public methods.

Three threads keep working when the event loop does not:

1. `Output` writes. A terminal that is not read blocks only this thread. While `MAX_PENDING_BYTES` wait, the rest is
   dropped, and the screen is drawn whole when the terminal is read again.
2. `Watcher` reads the terminal and receives the signals. Python runs signal handlers in the main thread only, which may
   be stuck; the bytes of `signal.set_wakeup_fd` arrive in any case.
3. Textual's input thread parses the keys. It reads a pipe, which `Watcher` fills with valid UTF-8.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import select
import signal
import socket
import sys
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from textual import constants
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

END_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)
# The event loop has this time to end the screen after a signal, then the process ends without it.
EXIT_GRACE_SECONDS = 1.2
# A terminal that is not read gets the last sequences within this time, or not at all.
FLUSH_SECONDS = 0.5
# A screen that is continued in the background waits this long for the signal that ends it.
CONTINUED_SECONDS = 0.5
# Two full screens of 200 columns in 24-bit colors. A slow connection shows the newest state, not all states before it.
MAX_PENDING_BYTES = 256 * 1024
READ_BYTES = 4096
# Mouse report of X10: three bytes follow, of any value. Terminals send it if they lack the newer reports, or after a
# reattach. Textual takes the bytes for text (textual#6668).
X10_MOUSE = re.compile(rb"\x1b\[M.{3}", re.DOTALL)
# Not the escape key alone: Textual's parser waits for its end already.
PARTIAL_X10_MOUSE = re.compile(rb"\x1b\[(?:M.{0,2})?\Z", re.DOTALL)
# The states that Textual's driver sets, in the order in which it resets them: bracketed paste, line wrap, resize
# reports, mouse, keyboard protocol of Kitty, alternate screen, cursor, focus reports.
RESTORE = (
    "\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l"
)


class Output:
    """Writes to the terminal in a thread. `on_drained` is called in it when writes were dropped and the rest is out."""

    def __init__(self, fd: int, on_drained: Callable[[], None]) -> None:
        self._fd, self._on_drained = fd, on_drained
        self._pending: deque[bytes] = deque()
        # Bytes of large writes, and of all else, that wait; and how many of them are being written.
        self._waiting, self._writing = Counter[bool](), Counter[bool]()
        self._lost = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="terminal-output", daemon=True).start()

    def write(self, data: bytes) -> None:
        """Write `data` whole, or drop it if too much waits. Never blocks."""
        # The frame of a large terminal may exceed the limit alone. The sequences that begin and end it neither keep it
        # from the terminal nor are kept by it: after a loss, all is drawn again, which would never end.
        is_large = len(data) >= MAX_PENDING_BYTES
        with self._changed:
            if self._waiting[is_large] >= MAX_PENDING_BYTES:
                self._lost = True
                return
            self._waiting[is_large] += len(data)
            self._pending.append(data)
            self._changed.notify_all()

    def discard(self) -> None:
        """Forget what waits, such as frames of a screen that is being left."""
        with self._changed:
            self._pending.clear()
            self._waiting = self._writing.copy()
            self._lost = False

    def flush(self, timeout_s: float) -> None:
        """Wait until all is written, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting.total(), timeout_s)

    def _run(self) -> None:
        writable = select.poll()
        writable.register(self._fd, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
                data = b"".join(self._pending)
                self._pending.clear()
                self._writing = self._waiting.copy()
            try:
                written = 0
                while written < len(data):
                    # Another program may have left the terminal non-blocking.
                    writable.poll()
                    with suppress(BlockingIOError):
                        written += os.write(self._fd, data[written:])
            except OSError:
                # The terminal is gone; `Watcher` sees that too.
                pass
            with self._changed:
                self._waiting -= self._writing
                self._writing.clear()
                drained, self._lost = self._lost and not self._pending, self._lost and bool(self._pending)
                self._changed.notify_all()
            if drained:
                self._on_drained()


class InputFilter:
    """Turns the bytes of a terminal into valid text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    def feed(self, data: bytes) -> str:
        """Return the text. The beginning of a mouse report is held until its end arrives."""
        data = X10_MOUSE.sub(b"", self._held + data)
        partial = PARTIAL_X10_MOUSE.search(data)
        self._held = b"" if partial is None else partial[0]
        return self._decoder.decode(data[: len(data) - len(self._held)])

    def release(self) -> str:
        """Return what is held, if no more bytes follow: a key, and no mouse report."""
        held, self._held = self._held, b""
        # Its report is incomplete.
        return "" if held.startswith(b"\x1b[M") else self._decoder.decode(held)

    @property
    def holds(self) -> bool:
        """Whether bytes are held."""
        return bool(self._held)


class Watcher:
    """Reads the terminal and the signals in a thread.

    `on_text` gets valid text. `on_end` gets the number of the signal that ends the screen; the end of the input counts
    as SIGHUP. If the process still lives `EXIT_GRACE_SECONDS` later, `on_overdue` gets the number. All are called in
    the thread.
    """

    def __init__(
        self, fd: int, on_text: Callable[[str], None], on_end: Callable[[int], None], on_overdue: Callable[[int], None]
    ) -> None:
        self._fd, self._on_text, self._on_end, self._on_overdue = fd, on_text, on_end, on_overdue
        self._filter = InputFilter()
        self.received: int | None = None
        """The last signal that ends the screen; the main thread sets it before it handles a SIGCONT that follows."""
        self._reading = False
        self._lock = threading.Lock()
        self._wakeup, waking = socket.socketpair()
        waking.setblocking(False)
        self._waking = waking
        for number in END_SIGNALS:
            # Without a Python handler, the signal would end the process at once.
            signal.signal(number, self._receive)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="terminal-watcher", daemon=True).start()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._counts(number):
            self.received = number

    def _counts(self, number: int) -> bool:
        """Whether a signal ends the screen. Ctrl-C does not while another program has the terminal."""
        return self._reading or number != signal.SIGINT

    def start_reading(self) -> None:
        """Read the terminal from now on."""
        with self._lock:
            self._reading = True
        self._wake()

    def stop_reading(self) -> None:
        """Leave all further input to the next program on the terminal."""
        with self._lock:
            self._reading = False
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            self._waking.send(b"\0")

    def _run(self) -> None:
        ended: int | None = None
        deadline = float("inf")
        while True:
            if ended is not None and time.monotonic() >= deadline:
                self._on_overdue(ended)
            poll = select.poll()
            poll.register(self._wakeup, select.POLLIN)
            if self._reading:
                poll.register(self._fd, select.POLLIN)
            holds = self._filter.holds
            timeout_s = constants.ESCAPE_DELAY if holds else deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(None if timeout_s == float("inf") else max(timeout_s, 0) * 1000)}
            received = self._wakeup.recv(READ_BYTES) if self._wakeup.fileno() in ready else b""
            number = next((number for number in END_SIGNALS if number in received and self._counts(number)), None)
            if self._fd in ready and not self._read():
                number = signal.SIGHUP
            if holds and not ready:
                self._deliver(self._filter.release())
            if number is not None and ended is None:
                ended, deadline = number, time.monotonic() + EXIT_GRACE_SECONDS
                self._on_end(ended)

    def _read(self) -> bool:
        """Read what was typed. Return False at the end of the input."""
        readable = select.poll()
        readable.register(self._fd, select.POLLIN)
        with self._lock:
            # While the lock was another's, the screen may have been suspended, and what was typed discarded.
            if not self._reading or not readable.poll(0):
                return True
            try:
                data = os.read(self._fd, READ_BYTES)
            except OSError:
                data = b""
            self._reading = bool(data)
        self._deliver(self._filter.feed(data))
        return bool(data)

    def _deliver(self, text: str) -> None:
        if text:
            self._on_text(text)


class TerminalDriver(LinuxDriver):
    """The driver of `TerminalApp`."""

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        self._textual_app = app
        self._event_loop = asyncio.get_running_loop()
        self.terminal = self.fileno
        """File descriptor of the terminal."""
        # `tui.terminal.characters` has set how it is encoded.
        self._stream = sys.__stderr__ or sys.stderr
        self._output = Output(self._stream.fileno(), lambda: self._in_loop(app.refresh))
        # Textual's input thread reads `fileno`, all else the terminal.
        self._keys, self._typed = os.pipe()
        os.set_blocking(self._typed, False)
        self._keys_ready = threading.Event()
        self._watcher = Watcher(self.terminal, self._type, self._end, self._end_now)
        self._suspended = False
        signal.signal(signal.SIGTSTP, lambda *_: self._suspend())
        signal.signal(signal.SIGCONT, lambda *_: self._continue())

    def _in_loop(self, function: Callable[[], object]) -> None:
        # The loop is closed when the screen has ended.
        with suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(function)

    def write(self, data: str) -> None:
        self._output.write(data.encode(self._stream.encoding, self._stream.errors or "replace"))

    # Application mode

    def start_application_mode(self) -> None:
        self._keys_ready.clear()
        self.fileno = self.terminal
        super().start_application_mode()  # type: ignore[no-untyped-call]
        self.fileno = self._keys
        self._keys_ready.set()
        self._watcher.start_reading()

    def disable_input(self) -> None:
        self._watcher.stop_reading()
        super().disable_input()
        self.fileno = self.terminal
        with suppress(termios.error):
            termios.tcflush(self.terminal, termios.TCIFLUSH)

    def stop_application_mode(self) -> None:
        self._output.discard()
        super().stop_application_mode()

    def close(self) -> None:
        super().close()
        self._output.flush(FLUSH_SECONDS)

    # Input

    def run_input_thread(self) -> None:
        self._keys_ready.wait()
        while not self.exit_event.is_set():
            # A sequence that Textual's parser does not survive is dropped, with what the parser has kept of it.
            with suppress(Exception):
                super().run_input_thread()

    def _type(self, text: str) -> None:
        # `Watcher` waits for nobody: what is typed far ahead of a screen that takes no keys is dropped.
        with suppress(BlockingIOError):
            os.write(self._typed, text.encode("utf-8", "replace"))

    # Ends

    def _end(self, number: int) -> None:
        self._in_loop(lambda: self._textual_app.exit(return_code=128 + number))

    def _end_now(self, number: int) -> None:
        """Restore the terminal and end the process without the event loop."""
        # In the background, the settings are the shell's, and changing them would stop the process.
        if self.attrs_before is not None and self._is_in_foreground():
            with suppress(termios.error):
                termios.tcsetattr(self.terminal, termios.TCSANOW, self.attrs_before)
        if not self._suspended:
            self._output.discard()
            self.write(RESTORE)
            self._output.flush(FLUSH_SECONDS)
        os._exit(128 + number)

    def _is_in_foreground(self) -> bool | None:
        """Whether the terminal is that of this job; None without a terminal."""
        try:
            return os.tcgetpgrp(self.terminal) == os.getpgrp()
        except OSError:
            return None

    # Suspension

    def _suspend(self) -> None:
        """Leave the terminal to the shell, and stop. POSIX discards SIGTSTP where no shell would continue the job."""
        if has_job_control():
            if not self._suspended:
                self._suspended = True
                self.suspend_application_mode()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _continue(self) -> None:
        """Draw again. After SIGSTOP, the shell has changed the terminal without notice, too."""
        in_foreground = self._is_in_foreground()
        if in_foreground is None:
            return
        if not in_foreground:
            # For `kill %1`, a shell sends SIGTERM to a stopped job, then SIGCONT. Any thread may take the first, later
            # than this one takes the second; the sleep runs its handler.
            deadline = time.monotonic() + CONTINUED_SECONDS
            while self._watcher.received is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._watcher.received is not None:
                self._end_now(self._watcher.received)
            # Continued by `bg` or `kill -CONT`: the terminal is another job's.
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if not self._suspended:
            self.suspend_application_mode()
        self._suspended = False
        self.resume_application_mode()
        self._in_loop(self._textual_app.refresh)


def has_job_control() -> bool:
    """Whether a shell would continue this process group after a stop: an ancestor of its session in another group.

    Source: POSIX.1-2017, 3.264 "Orphaned Process Group".
    """
    ancestor = os.getppid()
    with suppress(OSError):
        while ancestor and os.getpgid(ancestor) == os.getpgrp():
            ancestor = int(Path(f"/proc/{ancestor}/stat").read_text().rpartition(")")[2].split()[1])
        return ancestor > 0 and os.getsid(ancestor) == os.getsid(0)
    return False
