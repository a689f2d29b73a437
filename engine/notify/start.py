"""Start the watcher of a run from the process that owns it, and the checks before: `engine.launch` calls both."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from engine.config.notify_section import URLS_KEY
from engine.config.schema import Config
from engine.notify.destinations import has_destinations, read_destinations
from engine.runs.folder import RunFolder
from engine.runs.sinks import Sink, SinkError
from engine.utils.codec import encode
from engine.utils.errors import Problem, not_installed
from engine.utils.exits import exit_status
from engine.utils.files import file_number, file_size

# Slurm and a container kill all processes when the main one ends, the watcher too. There, the end of a run waits this
# long for its messages.
LAST_MESSAGE_SECONDS = 15.0


@dataclass
class RunNotifier:
    """The watcher of a run, as its owner sees it."""

    process: subprocess.Popen[bytes] | None = None
    journal_start: int = 0
    """See `WatchOptions`."""
    _warnings: list[Problem] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sink = Sink("the process that sends messages", self._warnings.append)

    def keep_alive(self, folder: RunFolder, config: Config) -> list[Problem]:
        """Start another watcher if this one has failed, some time after; return warnings. Called at each tick."""
        code = None if self.process is None else self.process.poll()
        if not code:
            return []
        status = exit_status(code)
        self._sink.attempt(lambda: self._restart(folder, config, status))
        warnings = list(self._warnings)
        self._warnings.clear()
        return warnings

    def _restart(self, folder: RunFolder, config: Config, status: str) -> None:
        """Raises SinkError. The first call only reports the failure."""
        if not self._sink.failed:
            raise SinkError(f"it {status}")
        # Without `waited_s`: the message that the run has its GPUs was sent.
        notifier, _ = start_watcher(folder, config, journal_start=self.journal_start)
        if notifier.process is None:
            # The sink, which has failed before, reports no reason of a later failure.
            raise SinkError("it cannot be started")
        self.process = notifier.process

    def wait_for_last_message(self) -> None:
        """Wait until the watcher has ended, if it would be killed with this process; at most `LAST_MESSAGE_SECONDS`."""
        if self.process is not None and ("SLURM_JOB_ID" in os.environ or os.getpid() == 1):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_MESSAGE_SECONDS)


def is_notified(config: Config) -> bool:
    """Whether a run sends messages."""
    return bool(config.notify.when) and has_destinations(config.notify.urls)


def notify_problems(config: Config) -> list[Problem]:
    """Return why messages of a new run could not be sent. A resumed run warns instead: it must not fail over this."""
    return [replace(problem, location=URLS_KEY) for problem in _problems(config)] if config.notify.urls else []


def _problems(config: Config) -> list[Problem]:
    if not is_notified(config):
        return []
    problems = read_destinations(config.notify.urls).problems
    if importlib.util.find_spec("apprise"):
        return problems
    return [Problem("", not_installed("apprise"), code="not-installed"), *problems]


def start_watcher(
    folder: RunFolder,
    config: Config,
    *,
    waited_s: float = 0.0,
    gpus: Sequence[str] = (),
    journal_start: int | None = None,
) -> tuple[RunNotifier, list[Problem]]:
    """Start the watcher of a session in a held folder, and return it with warnings.

    Without destinations there is none. `waited_s` is how long the run waited for its GPUs; `journal_start` is
    that of an earlier watcher of the session, which has failed. Never fails a run.
    """
    if not is_notified(config):
        return RunNotifier(), []
    # Most runs send no messages, and need neither.
    from engine.notify.observer import CRASH_GRACE_SECONDS, RESTART_GRACE_SECONDS, WatchOptions
    from engine.notify.outbox import RETRY_DELAYS_SECONDS

    notify = config.notify
    journal_start = file_size(folder.journal) if journal_start is None else journal_start
    options = WatchOptions(
        folder=str(folder.path),
        inode=file_number(os.fstat(folder.held_fd).st_ino),
        owner_pid=os.getpid(),
        journal_start=journal_start,
        urls=notify.urls,
        on=notify.when,
        min_minutes=notify.min_minutes,
        stall_minutes=notify.stall_minutes,
        watchdog_s=config.run.watchdog,
        crash_grace_s=RESTART_GRACE_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else CRASH_GRACE_SECONDS,
        # A run without GPUs waited for another run.
        waited_s=waited_s if gpus else 0.0,
        gpus=tuple(gpus),
        retry_delays_s=RETRY_DELAYS_SECONDS,
    )
    warnings = [replace(problem, reason=f"{problem.reason}; the run goes on without") for problem in _problems(config)]
    try:
        # Its environment has the variables of `env:NAME`. close_fds: it must hold no lock and no pipe of the run.
        process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-P", "-m", "engine.notify.watcher", folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=True,
            start_new_session=True,
        )
        assert process.stdin is not None  # noqa: S101 (for mypy)
        with process.stdin:
            process.stdin.write(encode(options))
    except OSError as error:
        reason = f"no messages are sent: their process cannot be started: {error.strerror}"
        return RunNotifier(), [*warnings, Problem("", reason, code="not-started")]
    return RunNotifier(process, journal_start), warnings
