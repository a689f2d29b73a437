"""A command of somebody else and every process that it starts: none escapes, and no other is ever ended.

`CommandProcess` is the supervisor's side; the command is a child of a keeper, see `engine.command.keeper`.
`engine.command.membership` decides which processes belong to it, `engine.command.stop` in which order they are ended.
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import engine
from engine.command.keeper import KILL_SECONDS
from engine.command.membership import MARKER, find_members, kill_all, signal_all
from engine.utils.errors import UsageError
from engine.utils.process_table import ProcessId, read_stat

_KEEPER = "import sys; sys.path.append({path!r}); from engine.command.keeper import main; main({control}, {report})"
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
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the command and return its exit code; None if it has not ended in time."""
        if self._exit_code is None and self._is_readable(timeout_s):
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _root(self) -> int | None:
        return self._keeper.pid if self._keeper.poll() is None else None

    def _is_readable(self, timeout_s: float | None) -> bool:
        if self._report < 0:
            return False
        # poll(2), because select(2) fails for descriptors from 1024 up.
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

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
