"""The messages of one session of a run: its owner feeds the recorded events, and a thread sends what they occasion.

Neither `add` nor `poll` waits for a service, so a slow or dead one delays no run. `engine.jobs.launch.phases` makes one
for each run that it claims, and `engine.runs.recorder` feeds it.
"""

from __future__ import annotations

import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

from engine.base.errors import Problem, not_installed
from engine.base.stall import StallWatch
from engine.config.loader import resolve_config
from engine.config.notify_section import URLS_KEY, Occasion
from engine.config.schema import Config
from engine.jobs.notify.message import Message, granted_sentence, make_end_message, make_message, stall_sentence
from engine.jobs.notify.sender import has_destinations, read_destinations, send_logged
from engine.runs.bottleneck import BottleneckKind, heat_bottleneck
from engine.runs.events import (
    Event,
    GpusGranted,
    RankFailed,
    RunFinished,
    RunStarted,
    SessionStarted,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.folder import RunFolder, RunState
from engine.runs.history import History
from engine.runs.run_record import NO_RECORD, RunRecord, read_run_record
from engine.runs.run_row import open_run, state_message

POLL_SECONDS = 1.0
# The end of a run waits this long for its last message.
LAST_MESSAGE_SECONDS = 15.0
# Occasions by the codes of what the supervisor of a command warns of: it sees what does not reach the journal, such as
# a progress bar.
COMMAND_OCCASIONS: dict[str, Occasion] = {"stalled": "stalled", "non-finite": "nan", "process-failed": "restarted"}
# A poll that comes this late means that this process or the host was suspended.
SUSPENDED_SECONDS = 60.0


def is_notified(config: Config) -> bool:
    """Whether a run sends messages."""
    return bool(config.notify.when) and has_destinations(config.notify.urls)


def notify_problems(config: Config) -> list[Problem]:
    """Return why messages of a new run could not be sent. A resumed run warns instead: it must not fail over this."""
    return [replace(problem, location=URLS_KEY) for problem in _problems(config)] if config.notify.urls else []


def _problems(config: Config) -> list[Problem]:
    if not is_notified(config):
        return []
    missing = [] if find_spec("apprise") else [Problem("", not_installed("apprise"), code="not-installed")]
    return missing + read_destinations(config.notify.urls)[1]


class Outbox:
    """Sends messages one after the other from a thread."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send, self._messages = send, SimpleQueue[Message | None]()
        # Started by the first message: most runs send none, and workers that a rank forks must not inherit it.
        self._thread = threading.Thread(target=self._work, name="messages", daemon=True)

    def put(self, message: Message) -> None:
        """Send a message soon."""
        self._messages.put(message)
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Wait for the messages, at most `LAST_MESSAGE_SECONDS`."""
        self._messages.put(None)
        if self._thread.ident is not None:
            self._thread.join(LAST_MESSAGE_SECONDS)

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            self._send(message)


class RunMessages:
    """Finds the occasions of the session of a run that starts when it is made, and puts their messages into `outbox`.

    It does nothing for a run without messages."""

    def __init__(
        self, folder: RunFolder, config: Config, outbox: Outbox, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._config, self._outbox, self._clock = folder, config, outbox, clock
        self._is_on = is_notified(config)
        self._history = History()
        """State of the session, without earlier ones."""
        self._started = self._slowed = self._waits = False
        self._failure: RankFailed | None = None
        self._last_poll = clock()
        self._stall = self._watch_stall()

    def _watch_stall(self) -> StallWatch:
        return StallWatch(60 * self._config.notify.stall_minutes, self._clock)

    def warnings(self) -> list[Problem]:
        """Return why messages cannot be sent."""
        return [replace(each, reason=f"{each.reason}; the run goes on without") for each in _problems(self._config)]

    def add(self, event: Event) -> None:
        """Follow an event that was recorded."""
        if not self._is_on:
            return
        if isinstance(event, WaitingForGpus):
            self._waits = True
        elif isinstance(event, GpusGranted):
            self._waits = False
            if event.devices:
                self._send("granted", granted_sentence(event.devices, event.seconds))
        else:
            self._history.add(event)
            self._follow(event)

    def _follow(self, event: Event) -> None:
        if isinstance(event, SessionStarted):
            # A start of the ranks after a failure in this session (`run.max_restarts`).
            if isinstance(event, RunStarted) and self._started and self._failure is not None:
                self._send("restarted", self._describe_failure(self._failure))
            self._started, self._failure, self._stall = True, None, self._watch_stall()
        elif isinstance(event, RankFailed):
            self._failure = event
        elif isinstance(event, WarningEvent) and self._history.command is not None:
            if (occasion := COMMAND_OCCASIONS.get(event.code)) is not None:
                self._send(occasion, event.message)
        elif isinstance(event, RunFinished):
            self._end(event)

    def _end(self, event: RunFinished) -> None:
        record = self._history.record()
        if event.state == "failed":
            sentence = event.message if self._failure is None else self._describe_failure(self._failure)
            self._send("failed", sentence, record)
        elif record.seconds >= 60 * self._config.notify.min_minutes and not self._waits:
            self._send("finished" if event.state == "finished" else "stopped", event.message, record)
        self._is_on = False

    @staticmethod
    def _describe_failure(failure: RankFailed) -> str:
        # It takes 20 ms to import, and most commands do not fail.
        from engine.train.distributed.failures import describe_failure

        return describe_failure(failure)

    def poll(self) -> None:
        """Follow the clock. To be called at least once per second."""
        now = self._clock()
        if not self._is_on or not self._started or now - self._last_poll < POLL_SECONDS:
            return
        self._poll_stall(is_late=now - self._last_poll > SUSPENDED_SECONDS)
        self._poll_throttling()
        self._last_poll = now

    def _poll_stall(self, *, is_late: bool) -> None:
        history, config = self._history, self._config
        place = (history.steps_done, history.current_epoch, history.phase, len(history.epochs))
        if is_late or history.paused or history.failures or history.command is not None:
            self._stall.restart(*place)
        elif (seconds := self._stall.poll(*place)) is not None:
            record = self._record()
            self._send("stalled", stall_sentence(record, seconds, config.run.watchdog), record)

    def _poll_throttling(self) -> None:
        history = self._history
        if self._slowed:
            return
        bottleneck = heat_bottleneck(history.started, history.throttling, time.time())
        if bottleneck is None and history.bottleneck is not None:
            # Power limits a busy GPU often. It counts if it is what limits the run.
            bottleneck = history.bottleneck if history.bottleneck.kind is BottleneckKind.THROTTLED else None
        if bottleneck is not None:
            self._slowed = True
            self._send("slowed", bottleneck.message)

    def hold(self, reason: str) -> None:
        """Send why the run and the rest of its batch are held."""
        path = self._folder.path
        command = f"gputrain queue release {shlex.quote(path.name)} --runs-dir {shlex.quote(str(path.parent))}"
        lines = [reason, f"start the rest with: {command}"]
        if self._is_on and "held" in self._config.notify.when:
            self._outbox.put(make_end_message("held", f"the batch of {path.name}", socket.gethostname(), lines))

    def _record(self) -> RunRecord:
        return read_run_record(self._folder) or NO_RECORD

    def _send(self, occasion: Occasion, sentence: str, record: RunRecord | None = None) -> None:
        if occasion not in self._config.notify.when:
            return
        # The folder may have been moved since.
        path, host, resumable = self._folder.path, socket.gethostname(), self._folder.resumable
        record = record or self._record()
        self._outbox.put(make_message(occasion, sentence, host, path, record, resumable=resumable))


WITHOUT_CHECKPOINT = "supervisor exited unexpectedly; there is no checkpoint to resume from"


def main(path: Path) -> None:
    """Send the message about the run in a folder, unless its config wants none."""
    folder = RunFolder(path)
    config, row = resolve_config(str(folder.config)).config, open_run(folder)
    record = row.record
    if row.state != RunState.CRASHED or "crashed" not in config.notify.when or not is_notified(config):
        return
    sentence = state_message(record, RunState.CRASHED) if folder.resumable else WITHOUT_CHECKPOINT
    message = make_message(
        "crashed", sentence, record.host or socket.gethostname(), path, record, resumable=folder.resumable
    )
    send_logged(folder, message, config.notify.urls)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
