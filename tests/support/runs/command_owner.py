"""Run commands with the driver of `gputrain run -- COMMAND` in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.base.files import file_number
from engine.config.schema import Config
from engine.jobs.command.spec import Program
from engine.jobs.launch.launcher import launch
from engine.jobs.launch.request import RunRequest
from engine.runs.event_lines import CommandOutput
from engine.runs.events import Event
from engine.runs.folder import RunFolder
from engine.runs.run_record import RunRecord, read_run_record

CHANGED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def make_command(cwd: Path, *argv: str, **values: Any) -> Program:
    """Return a command as `gputrain run -- ARGV` makes it in the folder `cwd`."""
    environment = values.pop("environment", {"PATH": os.environ["PATH"]})
    inode = file_number(cwd.stat().st_ino)
    return Program(argv=argv, cwd=str(cwd), cwd_inode=inode, environment=environment, **values)


class CommandRuns:
    """Runs commands in one folder, and reads what their runs recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cwd = folder / "runs", folder / "work"
        self.cwd.mkdir()
        self.events: list[Event] = []

    def run(self, *argv: str, config: dict[str, dict[str, Any]] | None = None, **values: Any) -> int:
        """Run a command as the run `a`, and return the exit code. `config` has sections, `values` are of the command
        or of the request."""
        of_request = {name: values.pop(name) for name in ("tags", "detached", "code_trust") if name in values}
        command = values.pop("command", None) or make_command(self.cwd, *argv, **values)
        sections = {"run": {}, "device": {}} | (config or {})
        sections["run"] = {"name": "a"} | sections["run"]
        sections["device"] = {"gpus": "cpu"} | sections["device"]
        request = RunRequest(Config().with_values(**sections), self.folder, "a", command=command, **of_request)
        with unchanged_process():
            return launch(request, self.events.append)

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(self.folder / "a")

    @property
    def record(self) -> RunRecord:
        record = read_run_record(self.run_folder)
        assert record is not None
        return record

    @property
    def log(self) -> str:
        return self.run_folder.log.read_text()

    @property
    def output(self) -> list[str]:
        """The lines that were shown."""
        return [line for event in self.events if isinstance(event, CommandOutput) for line in event.lines]

    def when(self, text: str, act: Callable[[], object]) -> threading.Thread:
        """Do something in a thread once the output has a line."""

        def wait() -> None:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if text in self.output:
                    act()
                    return
                time.sleep(0.02)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@contextmanager
def stdin_with(text: str) -> Iterator[None]:
    """Make a pipe with a text the stdin of this process."""
    before = os.dup(0)
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    os.dup2(reading, 0)
    os.close(reading)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore what a supervisor changes in its process: signal handlers and the umask."""
    handlers = {number: signal.getsignal(number) for number in CHANGED_SIGNALS}
    umask = os.umask(0o022)
    os.umask(umask)
    try:
        yield
    finally:
        os.umask(umask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
