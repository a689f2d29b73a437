"""The supervisor of the command of another program: its output, its end, control requests, and what it leaves behind.

`command_run` runs one per start of the command. The processes are those of `engine.command.process_tree`.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import termios
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.command.process_tree import CommandProcess
from engine.command.stop import Step, StopSequence
from engine.command.terminal import OutputLine, Terminal
from engine.launch.command_metrics import RunningMetrics
from engine.runs.control import QUEUE_REQUEST_NAMES, REFUSAL_OUTCOMES, REQUEST_NAMES, consume_requests
from engine.runs.event_lines import CommandOutput
from engine.runs.events import ControlEvent, Event, WarningEvent
from engine.runs.recorder import Recorder
from engine.utils.colors import without_colors
from engine.utils.errors import Problem
from engine.utils.exits import signal_name
from engine.utils.process import SignalHandler
from engine.utils.text import list_names

# A request waits so long at most.
TICK_SECONDS = 1.0
# Output that comes so shortly before a tick brings it forward: the process wakes once for both.
EARLY_SECONDS = 0.5
# Output is collected, so that a program that prints character by character does not wake this process for each.
COLLECT_SECONDS = 0.05
# Half of the buffer of a terminal. The program waits when it is full.
FULL_BYTES = 1 << 11
# The summary of torchrun takes seven lines a rank.
MAX_LAST_LINES = 200


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended. `exit_code` is negative for a signal. `stopped_by` says who requested the stop, and is empty
    if it ended on its own. `last_lines` are those of its output, without colors. `unkillable` names the processes that
    SIGKILL has not ended; if the command is one of them, `has_ended` is False."""

    exit_code: int
    stopped_by: str
    last_lines: tuple[str, ...]
    unkillable: str = ""
    has_ended: bool = True


class CommandSupervisor:
    """Supervises one start of a command.

    `emit` receives each event; `on_tick` is called at least every `TICK_SECONDS` and must not block."""

    def __init__(
        self,
        process: CommandProcess,
        terminal: Terminal,
        recorder: Recorder,
        metrics: RunningMetrics,
        signals: SignalHandler,
        emit: Callable[[Event], None],
        on_tick: Callable[[], None],
        stop_signal: signal.Signals,
    ) -> None:
        self._process, self._terminal, self._recorder, self._metrics = process, terminal, recorder, metrics
        self._signals, self._emit, self._on_tick = signals, emit, on_tick
        self._stop_signal = stop_signal
        self._stop = StopSequence(process, stop_signal)
        self._stopped_by = ""
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._pending: list[str] = []
        self._next_tick = time.monotonic()

    def run(self) -> CommandEnd:
        """Run until the command and all that it started have ended."""
        with _wakeups() as wakeup:
            while True:
                # At least once: a command that ends at once is restarted, which a stop request must end.
                self._handle_signals()
                if time.monotonic() >= self._next_tick:
                    self._next_tick = time.monotonic() + TICK_SECONDS
                    self._tick()
                is_running = self._process.poll() is None
                if self._has_ended(is_running=is_running):
                    break
                self._wait(wakeup, is_running=is_running)
                self._add_output(self._terminal.read())
        self._add_output(self._terminal.close())
        self._metrics.close()
        self._report_left_behind()
        code = self._process.poll()
        # Without one, SIGKILL has not ended it.
        return CommandEnd(-signal.SIGKILL if code is None else code, self._stopped_by, tuple(self._last_lines))

    def _has_ended(self, *, is_running: bool) -> bool:
        # Looking for what is left takes milliseconds, so not while the command itself runs.
        if is_running and self._stop.seconds_left != 0:
            return False
        return self._stop.poll()

    def _wait(self, wakeup: int, *, is_running: bool) -> None:
        """Wait for output, the end of the command, a signal or the next tick."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        if is_running:
            poll.register(self._process.fileno(), select.POLLIN)
        outputs = self._terminal.readable
        for descriptor in outputs:
            poll.register(descriptor, select.POLLIN)
        left = max(self._next_tick - time.monotonic(), 0.0)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * (left if is_running else COLLECT_SECONDS))}
        if wakeup in ready:
            os.read(wakeup, 1 << 10)
        elif ready and is_running and self._process.fileno() not in ready:
            if _unread_bytes(ready) < FULL_BYTES:
                for descriptor in outputs:
                    poll.unregister(descriptor)
                poll.poll(1000 * COLLECT_SECONDS)
            if self._next_tick - time.monotonic() < EARLY_SECONDS:
                self._next_tick = time.monotonic()

    def _tick(self) -> None:
        self._show_output()
        self._metrics.poll(self._terminal.pending)
        # Writes the record, with the metrics that were read.
        self._on_tick()
        # Requests that wait together are one: a suspended supervisor may find that of an impatient script twice.
        is_second = bool(self._stopped_by)
        for request in consume_requests(self._recorder.folder.control):
            outcome = self._apply(request.request, request.by, is_second=is_second)
            self._emit(ControlEvent(request=request.request, by=request.by, outcome=outcome))

    def _apply(self, request: str, by: str, *, is_second: bool) -> str:
        """Carry out a control request, and return its outcome. `is_second`: a stop was requested before."""
        if request == "stop":
            return self._kill() if is_second and self._stop.step < Step.KILL else self._request_stop(by)
        if request in QUEUE_REQUEST_NAMES:
            return "ignored: the run does not wait for GPUs"
        if request in REQUEST_NAMES:
            return "refused: only trainings of gputrain do that; a command takes stop"
        return REFUSAL_OUTCOMES.get(request, "unknown request, ignored")

    def _request_stop(self, by: str) -> str:
        if self._stopped_by:
            return "already requested"
        self._stopped_by = by
        self._stop.request()
        return f"{signal_name(self._stop_signal)} sent; SIGTERM and SIGKILL follow if it does not end"

    def _kill(self) -> str:
        self._stop.request()
        return "its processes are killed"

    def _handle_signals(self) -> None:
        name = self._signals.signal_name
        if name is not None and not self._stopped_by:
            self._emit(ControlEvent(request="stop", by=name, outcome=self._request_stop(name)))
        if self._signals.kill_requested and self._stop.step < Step.KILL:
            self._emit(ControlEvent(request="stop", by="a second SIGINT", outcome=self._kill()))

    def _add_output(self, lines: list[OutputLine]) -> None:
        if not lines:
            return
        texts = [line.log_text for line in lines]
        self._recorder.add_output(texts)
        self._show_output(texts)
        self._last_lines.extend(text for line in lines[-MAX_LAST_LINES:] if (text := without_colors(line.text)).strip())
        self._metrics.add_lines(lines, self._terminal.pending())

    def _show_output(self, lines: Sequence[str] = ()) -> None:
        """Show final lines, and below them those that may still change."""
        pending = [line.log_text for line in self._terminal.pending()]
        self._recorder.show_pending(pending)
        if lines or pending != self._pending:
            self._pending = pending
            self._recorder.show(CommandOutput(lines=[*lines], pending=tuple(pending)))

    def _report_left_behind(self) -> None:
        if self._stop.left_behind and not self._stopped_by:
            names = list_names(self._stop.left_behind)
            reason = f"the command left processes behind, which were ended: {names}"
            self._emit(WarningEvent.of(Problem("", reason, code="process-left")))


def _unread_bytes(descriptors: Iterable[int]) -> int:
    """Return how much can be read from terminals and pipes (ioctl_tty(2))."""
    unread = array("i", [0])
    total = 0
    for descriptor in descriptors:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        total += unread[0]
    return total


@contextmanager
def _wakeups() -> Iterator[int]:
    """Yield a descriptor that is readable when a signal has arrived."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
