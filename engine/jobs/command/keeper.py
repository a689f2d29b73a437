"""The keeper of a command: a small process between the supervisor and the command, which outlives both.

Orphans of the command become its children (PR_SET_CHILD_SUBREAPER), so its descendants are all processes of the
command, and their zombies do not disturb the children of the supervisor. When the supervisor ends, even by SIGKILL, its
end of a pipe closes, and the keeper kills what is left. `engine.jobs.command.process_tree` starts it in the working
folder.

It stays in memory as long as the command, so it imports little.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import select
import signal
import termios
import time
from contextlib import suppress

from engine.jobs.command.membership import enter_cgroup, kill_all, make_cgroup, remove_cgroup

# A process that does not return from a call of the kernel cannot be killed.
KILL_SECONDS = 5.0
POLL_SECONDS = 0.02
# A person, a terminal or a batch system may send them to every process.
IGNORED_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, report: int) -> None:
    """Run the command that `control` describes, a marshalled tuple of run ID, argv, environment and the signals that
    the command ignores, and kill its processes when `control` is closed.

    Writes lines to `report`: "started PID CGROUP" or "failed ERRNO", then "exit CODE".
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
    with open(control, "rb", closefd=False) as request:
        run_id, argv, env, ignored = marshal.load(request)  # noqa: S302 (of the supervisor)
    cgroup = make_cgroup(run_id)
    command, failure = _start(argv, env, ignored, cgroup, libc)
    if failure:
        _write(report, f"failed {failure}")
    else:
        _write(report, f"started {command} {cgroup or ''}")
        _leave_folder_and_output()
        _wait_until_closed(control, child_ended, command, report)
    deadline = time.monotonic() + KILL_SECONDS
    while kill_all(run_id, os.getpid(), cgroup) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        _reap(command, report)
    if cgroup is not None:
        remove_cgroup(cgroup)


def _start(
    argv: list[bytes], env: dict[bytes, bytes], ignored: list[int], cgroup: str | None, libc: ctypes.CDLL
) -> tuple[int, str]:
    """Start the command, and return its process ID, and the number of the error if it cannot be executed."""
    failed, report = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()
            if os.isatty(1):
                fcntl.ioctl(1, termios.TIOCSCTTY, 0)
            if cgroup is not None:
                enter_cgroup(cgroup)
            _restore_signals(ignored)
            os.execvpe(argv[0], argv, env)  # noqa: S606
        except OSError as error:
            os.write(report, str(error.errno).encode())
        finally:
            os._exit(1)
    os.close(report)
    # Empty if the command was started, because the descriptor is closed by the call.
    failure = os.read(failed, 1 << 10).decode()
    os.close(failed)
    return pid, failure


def _restore_signals(ignored: list[int]) -> None:
    """Give all other signals their default action: the supervisor ignores some, and Python others."""
    for number in signal.valid_signals():
        with suppress(OSError):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


def _leave_folder_and_output() -> None:
    """Leave the working folder, and close the terminal or pipes of the command, which end with its last process."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _wait_until_closed(control: int, child_ended: int, command: int, report: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(child_ended, select.POLLIN)
    while control not in (ready := [descriptor for descriptor, _ in poll.poll()]):
        if child_ended in ready:
            os.read(child_ended, 1 << 10)
            _reap(command, report)


def _reap(command: int, report: int) -> None:
    """Remove the zombies among the children, and report the exit code of the command."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                _write(report, f"exit {os.waitstatus_to_exitcode(ended[1])}")


def _write(descriptor: int, line: str) -> None:
    with suppress(BrokenPipeError):
        os.write(descriptor, f"{line}\n".encode())
