"""A command of somebody else and every process that it starts: none escapes, and no other is ever ended.

`CommandProcess` is the supervisor's side; the command is a child of a keeper, see `engine.jobs.command.keeper`.
`engine.jobs.command.membership` decides which processes belong to it.

`StopSequence` decides which signals they get, in which order, and how long each may take. The command itself is asked
first, because it knows what to save and which processes are its own. What remains after its end was left behind by a
crash, or by a program that puts itself into the background."""

from __future__ import annotations

import errno
import marshal
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

import engine
from engine.base.errors import UsageError
from engine.base.process_table import ProcessId, read_stat
from engine.base.text import list_names, printable
from engine.jobs.command.keeper import KILL_SECONDS
from engine.jobs.command.membership import MARKER, find_members, kill_all, signal_all

_KEEPER = (
    "import sys; sys.path.append({path!r}); from engine.jobs.command.keeper import main; main({control}, {report})"
)
# The keeper waits so long for processes that cannot be killed.
CLOSE_SECONDS = KILL_SECONDS + 2.0


class CommandProcess:
    """A running command and everything that it started.

    `pid` is the process of the command itself, the leader of a session of its own.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        marker: str,
        ignored_signals: Sequence[int] = (),
    ) -> None:
        """Start the command. `marker` is the unique ID of this start of the run, which its environment gets.
        A terminal as `stdout` is the controlling one. The command ignores `ignored_signals` unless it handles them.

        Raises UsageError.
        """
        self.run_id = marker
        self._exit_code: int | None = None
        control, self._control = os.pipe()
        self._report, report = os.pipe()
        program = _KEEPER.format(path=str(Path(engine.__file__).parents[1]), control=control, report=report)
        try:
            self._keeper = subprocess.Popen(  # noqa: S603 (our own program)
                # Packages and start files of the user are not loaded.
                [sys.executable, "-I", "-S", "-c", program],
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(control, report),
                # The marker tells an outer run that the keeper is none of its processes.
                env=os.environ | {MARKER: marker},
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._control)
            os.close(self._report)
            reason = f"cannot be started: {error.strerror}"
            raise UsageError.one(str(error.filename), reason, code="not-started") from error
        finally:
            os.close(control)
            os.close(report)
        self._cgroup: str | None = None
        try:
            _send(self._control, marker, argv, {**env, MARKER: marker}, ignored_signals)
            result, *answer = self._read_line().split(" ", 2)
        except BaseException:
            self.close()
            raise
        if result != "started":
            self.close()
            raise _start_error(int(answer[0]) if answer else 0, argv[0], cwd, env)
        self.pid, self._cgroup = int(answer[0]), answer[1] or None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` returns the exit code."""
        return self._report

    def poll(self) -> int | None:
        """Return the exit code of the command, negative for a signal; None while it runs."""
        if self._exit_code is None and self._is_readable():
            result, _, code = self._read_line().partition(" ")
            # Linux kills the command if its keeper was killed.
            self._exit_code = int(code) if result == "exit" else -signal.SIGKILL
        return self._exit_code

    def members(self) -> list[ProcessId]:
        """Return the processes of the command that have not ended, also after the end of the command itself."""
        return find_members(self.run_id, self._root())

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group of the command, as a terminal does, but to no inner run in it."""
        groups = [(member, read_stat(member.pid)) for member in self.members()]
        signal_all((member for member, status in groups if status is not None and status.group == self.pid), number)

    def end_all(self, number: int) -> None:
        """Send a signal to every process of the command. What it forks meanwhile is reached by the next call."""
        if number == signal.SIGKILL:
            kill_all(self.run_id, self._root(), self._cgroup)
        else:
            signal_all(self.members(), number)

    def close(self) -> list[ProcessId]:
        """Kill what is left, and return what cannot be killed: it is in a call of the kernel that does not return."""
        if self._control >= 0:
            os.close(self._control)
            with suppress(subprocess.TimeoutExpired):
                self._keeper.wait(CLOSE_SECONDS)
            self.poll()
            os.close(self._report)
            self._control = self._report = -1
        return [member for member in self.members() if member.pid != self._keeper.pid]

    def _root(self) -> int | None:
        return self._keeper.pid if self._keeper.poll() is None else None

    def _is_readable(self) -> bool:
        if self._report < 0:
            return False
        # poll(2), because select(2) fails for descriptors from 1024 up.
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        return bool(poll.poll(0))

    def _read_line(self) -> str:
        """Return the next line of the keeper; empty if it has ended."""
        line = b""
        while (character := os.read(self._report, 1)) not in (b"", b"\n"):
            line += character
        return os.fsdecode(line)


def _send(
    control: int, run_id: str, argv: Sequence[str], env: Mapping[str, str], ignored_signals: Sequence[int]
) -> None:
    # Bytes, because the keeper need not have the encoding of this process.
    environment = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    request = (run_id, list(map(os.fsencode, argv)), environment, list(map(int, ignored_signals)))
    # A keeper that has ended is noticed when its answer is read.
    with suppress(BrokenPipeError), open(control, "wb", closefd=False) as file:
        marshal.dump(request, file)


def _start_error(number: int, program: str, cwd: Path, env: Mapping[str, str]) -> UsageError:
    """Return why a command was not executed. As for a shell, a program that is not found differs from others."""
    reason = os.strerror(number) if number else "the process that holds it could not be started"
    code = "command-not-executable" if number else "not-started"
    if number in (errno.ENOENT, errno.ENOTDIR):
        if shutil.which(cwd / program if "/" in program else program, path=env.get("PATH")) is None:
            code = "command-not-found"
        else:
            reason = "the interpreter in its first line does not exist"
    elif number == errno.ENOEXEC:
        reason = "it is neither a program for this machine nor a script with a first line like #!/bin/sh"
    return UsageError.one(program, f"cannot be started: {reason}", code=code)


# torchrun forwards the signal to its ranks and kills them after 30 s.
STOP_GRACE_SECONDS = 35.0
# For the processes of a command that has ended.
LEFTOVER_GRACE_SECONDS = 5.0
# After SIGKILL. The driver needs seconds to free the memory of several GPUs.
KILL_GRACE_SECONDS = 30.0


class Step(IntEnum):
    """What the processes of a command were sent last."""

    NONE = 0
    STOP = 1
    """The stop signal, to the process group of the command."""
    TERMINATE = 2
    """SIGTERM, to all processes."""
    KILL = 3
    """SIGKILL, to all processes."""


class StopSequence:
    """Ends a command on request, and in any case what it leaves behind. The supervisor calls `poll` in its loop.

    `left_behind` are the names and IDs of the processes that were there when the command itself had ended, for a
    message.
    """

    def __init__(
        self,
        process: CommandProcess,
        stop_signal: int = signal.SIGINT,
        *,
        grace_s: float = STOP_GRACE_SECONDS,
        leftover_grace_s: float = LEFTOVER_GRACE_SECONDS,
        kill_grace_s: float = KILL_GRACE_SECONDS,
    ) -> None:
        self._process, self.stop_signal = process, stop_signal
        self._grace_s, self._leftover_grace_s, self._kill_grace_s = grace_s, leftover_grace_s, kill_grace_s
        self._next_step_at = math.inf
        self._has_ended = False
        self.step = Step.NONE
        self.left_behind: Sequence[str] = ()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next step; None if none is due."""
        return None if self._next_step_at == math.inf else max(self._next_step_at - time.monotonic(), 0.0)

    def request(self) -> None:
        """Ask the command to stop. Another request kills all of its processes at once."""
        self._take(Step.STOP if self.step is Step.NONE else Step.KILL)

    def poll(self) -> bool:
        """Take the next step if it is due. Return whether all processes have ended, as far as they can be killed.

        The command itself may be one that cannot: `engine.jobs.command.process_tree` returns what is left."""
        if self._process.poll() is not None:
            members = self._process.members()
            if not members:
                return True
            if not self._has_ended:
                self._has_ended, self.left_behind = True, list(map(_describe, members))
                grace_s = 0.0 if self.step is Step.NONE else self._leftover_grace_s
                self._next_step_at = min(self._next_step_at, time.monotonic() + grace_s)
        if self.step is Step.KILL:
            # What has been started since the last call.
            self._process.end_all(signal.SIGKILL)
        if time.monotonic() < self._next_step_at:
            return False
        if self.step is Step.KILL:
            return True
        self._take(Step.KILL if self.step is Step.TERMINATE else Step.TERMINATE)
        return False

    def _take(self, step: Step) -> None:
        self.step = step
        if step is Step.STOP:
            self._process.signal_group(self.stop_signal)
        else:
            self._process.end_all(signal.SIGKILL if step is Step.KILL else signal.SIGTERM)
        grace_s = self._leftover_grace_s if self._has_ended else self._grace_s
        self._next_step_at = time.monotonic() + (self._kill_grace_s if step is Step.KILL else grace_s)


def _describe(process: ProcessId) -> str:
    status = read_stat(process.pid)
    return f"{printable(status.name) if status is not None else '?'} ({process.pid})"


def describe_unkillable(processes: Sequence[ProcessId]) -> str:
    """Return which processes SIGKILL has not ended, why, and when they end, as a sentence without its period."""
    names = list_names(list(map(_describe, processes)))
    statuses = [read_stat(process.pid) for process in processes]
    # The kernel does not tell which: /proc/PID/stack is for root, and wchan is empty in most kernels.
    is_blocked = any(status is not None and status.state == "D" for status in statuses)
    reason = "blocked on I/O (a disk, a file server or a GPU)" if is_blocked else "the kernel has not ended it yet"
    return f"{'process' if len(processes) == 1 else 'processes'} {names} cannot be killed: {reason}"
