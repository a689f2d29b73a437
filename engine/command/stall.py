"""A command that shows no sign of life: no output, no metric, no work on its GPUs, and where its Python processes are.

`engine.launch.command_run` polls `StallReporter` and records its warning, of which `engine.notify` sends a message.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.utils.errors import Problem
from engine.utils.process_table import ProcessId, read_stat
from engine.utils.text import printable
from engine.utils.units import format_duration

# A stall is longer than this many times the longest silence so far: a service is silent between requests.
STALL_RATIO = 3.0
# py-spy stops a process while it reads it.
DUMP_SECONDS = 20
MAX_DUMPS = 16
MAX_DUMP_BYTES = 1 << 20


@dataclass
class StallWatch:
    """Detects stalls of a command, and reports each one once."""

    limit_s: float
    """Seconds without a sign of life; 0 disables."""
    clock: Callable[[], float] = time.monotonic
    _signs: tuple[object, ...] = ()
    _since: float = 0.0
    _longest_s: float = 0.0
    _is_told: bool = False

    def __post_init__(self) -> None:
        self._since = self.clock()

    def poll(self, *signs: object) -> float | None:
        """Return for how many seconds the command has shown none of the signs, once it is too long; else None.

        `signs` are values that change when the command does something."""
        silent_s = self.clock() - self._since
        if signs != self._signs:
            self._longest_s = max(self._longest_s, silent_s)
            self._signs, self._since, self._is_told = signs, self.clock(), False
            return None
        if not self.limit_s or self._is_told or silent_s < max(self.limit_s, STALL_RATIO * self._longest_s):
            return None
        self._is_told = True
        return silent_s


@dataclass
class StackDump:
    """What py-spy, if it is installed, finds about the Python processes of a command that has stalled.

    It takes seconds, so a thread does it. `message` says what was found and is None until then."""

    seconds: float
    """How long the command has been silent."""
    members: Sequence[ProcessId]
    file: Path
    message: str | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin. Without py-spy there is nothing to do."""
        program = shutil.which("py-spy")
        python = [each.pid for each in self.members if _is_python(each)][:MAX_DUMPS]
        if program is None or not python:
            self.message = ""
            return
        # At the end of this process it is not waited for.
        threading.Thread(target=self._dump, args=(program, python), daemon=True).start()

    def _dump(self, program: str, pids: Sequence[int]) -> None:
        message = ""
        try:
            texts = [_dump_process(program, pid) for pid in pids]
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write("\n".join(text for text, _ in texts)[:MAX_DUMP_BYTES])
            reasons = [reason for _, reason in texts if reason]
            found = len(texts) - len(reasons)
            message = f"{self.file.name} has the stacks of its Python processes" if found else f"py-spy: {reasons[0]}"
        except OSError:
            # The warning says what is known without the file.
            pass
        finally:
            self.message = message


def _is_python(process: ProcessId) -> bool:
    status = read_stat(process.pid)
    # The main thread of torchrun's ranks is called pt_main_thread.
    return status is not None and status.name.startswith(("python", "pt_", "torchrun", "accelerate"))


def _dump_process(program: str, pid: int) -> tuple[str, str]:
    """Return what py-spy prints about a process, and why it could not read it."""
    try:
        done = subprocess.run(  # noqa: S603 (the program that `which` finds)
            [program, "dump", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DUMP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "", printable(str(error))
    text = "".join(f"{printable(line)}\n" for line in done.stdout.splitlines())
    last = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
    return text, printable(last) if done.returncode else ""


class StallReporter:
    """Warns once of each stall of a command, with what py-spy finds.

    `members` returns the processes of the command, `file` is for their stacks."""

    def __init__(
        self, limit_s: float, members: Callable[[], Sequence[ProcessId]], file: Path, warn: Callable[[Problem], None]
    ) -> None:
        self._watch = StallWatch(limit_s)
        self._members, self._file, self._warn = members, file, warn
        self._dump: StackDump | None = None

    def poll(self, *signs: object) -> None:
        """Warn if it is time. `signs` are values that change when the command does something."""
        if (seconds := self._watch.poll(*signs)) is not None:
            # Before another dump takes its place.
            self.close()
            self._dump = StackDump(seconds, self._members(), self._file)
            self._dump.start()
        if self._dump is not None and self._dump.message is not None:
            self.close()

    def close(self) -> None:
        """Warn of the stall whose stacks are read, with what has been found so far."""
        if self._dump is not None:
            self._warn(Problem("", stall_sentence(self._dump.seconds, self._dump.message or ""), code="stalled"))
            self._dump = None


def stall_sentence(seconds: float, found: str = "") -> str:
    """Return for how long a command has shown no sign of life, and what was found about it."""
    sentence = f"no output, no metric and no work on its GPUs for {format_duration(seconds)}"
    return f"{sentence}; {found}" if found else sentence
