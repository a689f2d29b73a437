"""The keeper of a command: a small process between the supervisor and the command, which outlives both.

Orphans of the command become its children (PR_SET_CHILD_SUBREAPER), so its descendants are all processes of the
command, and their zombies do not disturb the children of the supervisor. When the supervisor ends, even by SIGKILL, its
end of a pipe closes, and the keeper kills what is left. `engine.command.process_tree` starts it.

It stays in memory as long as the command, so it imports little.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import select
import signal
import time
from contextlib import suppress

from engine.command.cgroup import enter_cgroup, make_cgroup, remove_cgroup
from engine.command.membership import kill_all

# The first message of the supervisor: the size of the rest, then a marshalled tuple (run ID, argv, cwd, env, signals
# that the command ignores).
SIZE_BYTES = 8
# A process that does not return from a call of the kernel cannot be killed.
KILL_SECONDS = 5.0
POLL_SECONDS = 0.02
# A person, a terminal or a batch system may send them to every process.
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, report: int) -> None:
    """Run the command that `control` describes, and kill its processes when `control` is closed.

    Writes lines to `report`: "started PID CGROUP" or "failed STEP ERRNO", then "exit CODE".
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (control, report):
        os.set_inheritable(descriptor, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child_ended, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    request = marshal.loads(_read(control, int.from_bytes(_read(control, SIZE_BYTES))))  # noqa: S302 (of the supervisor)
    run_id, argv, cwd, env, ignored = request
    cgroup = make_cgroup(run_id)
    command = _Command(argv, cwd, env, ignored, cgroup, libc)
    if command.pid is None:
        _write(report, f"failed {command.failure}")
    else:
        _write(report, f"started {command.pid} {cgroup or ''}")
        _close_output()
        _wait_until_closed(control, child_ended, command.pid, report)
    deadline = time.monotonic() + KILL_SECONDS
    while kill_all(run_id, os.getpid(), cgroup) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        _reap(command.pid, report)
    if cgroup is not None:
        remove_cgroup(cgroup)


class _Command:
    """The command after its start. `failure` is the step and the error number if there is no `pid`."""

    def __init__(
        self,
        argv: list[bytes],
        cwd: bytes,
        env: dict[bytes, bytes],
        ignored_signals: list[int],
        cgroup: str | None,
        libc: ctypes.CDLL,
    ) -> None:
        self.pid: int | None = None
        self.failure = ""
        failed, report = os.pipe2(os.O_CLOEXEC)
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.failure = f"fork {error.errno}"
            return
        if pid == 0:
            step = "start"
            try:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != keeper:
                    os._exit(1)
                os.setsid()
                if cgroup is not None:
                    enter_cgroup(cgroup)
                _restore_signals(ignored_signals)
                step = "chdir"
                os.chdir(cwd)
                step = "exec"
                os.execvpe(argv[0], argv, env)  # noqa: S606
            except OSError as error:
                os.write(report, f"{step} {error.errno}".encode())
            except ValueError:
                # A null byte.
                os.write(report, f"{step} {errno.EINVAL}".encode())
            finally:
                os._exit(1)
        os.close(report)
        # Empty if the command was started, because the descriptor is closed by the call.
        self.failure = os.read(failed, 1 << 10).decode()
        os.close(failed)
        self.pid = pid if not self.failure else None


def _restore_signals(ignored: list[int]) -> None:
    """Give all other signals their default action: the supervisor ignores some, and Python others."""
    for number in signal.valid_signals():
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_output() -> None:
    """Close the terminal, or the pipes, of the command: they end with its last process."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _wait_until_closed(control: int, child_ended: int, command: int, report: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(child_ended, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if child_ended in ready:
            os.read(child_ended, 1 << 10)
            _reap(command, report)
        if control in ready:
            return


def _reap(command: int | None, report: int) -> None:
    """Remove the zombies among the children, and report the exit code of the command."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == command:
            _write(report, f"exit {os.waitstatus_to_exitcode(status)}")


def _read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            # The supervisor has ended.
            os._exit(1)
        data += part
    return data


def _write(descriptor: int, line: str) -> None:
    with suppress(BrokenPipeError):
        os.write(descriptor, f"{line}\n".encode())
