"""What the entry points of `gputrain` and `gputrain-tui` do before and around a command: reserve the standard streams,
handle signals, and report faults of the environment.

`tui` imports it first, so it imports only what every Python process has loaded anyway.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.base.exit_codes import ExitCode

# typing takes 3 ms to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn


class OutputError(OSError):
    """Standard output cannot be written, for example because its disk is full."""


class _Output(io.FileIO):
    """Standard output, whose errors differ from those of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


class _Messages(io.FileIO):
    """Standard error. A message that nobody can read changes neither what the program does nor its exit code."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def begin_process() -> None:
    """Prepare this process; the first statement of an entry point.

    Until `reported_faults`, SIGINT ends the process at once: there is nothing to clean up, and a KeyboardInterrupt
    during an import would show a traceback."""
    if os.getpid() == 1:
        # The kernel ignores signals without a handler for the first process of a container.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit_on_signal)
    elif signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A shell that runs it in the background ignores SIGINT, which stays ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    reserve_standard_descriptors()
    sys.stdout = _rewrapped(sys.stdout, _Output)
    sys.stderr = _rewrapped(sys.stderr, _Messages)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def reserve_standard_descriptors() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise the next file or pipe gets its number, and messages and logs are written into that file or pipe."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The kernel returns the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _rewrapped(stream: Any, raw_class: type[io.FileIO]) -> Any:
    """Return a stream like `stream` that writes through `raw_class`."""
    raw = raw_class(stream.fileno(), "w", closefd=False)
    # PYTHONUNBUFFERED removes the buffer, and `stream` writes to the file itself.
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextmanager
def reported_faults() -> Iterator[None]:
    """Run a command: SIGINT raises KeyboardInterrupt in it, and faults of its environment end it with one sentence."""
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, _exit_on_signal):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # Relative paths have no meaning without it, and torch cannot be imported.
        try:
            os.getcwd()  # noqa: PTH109 - pathlib takes time to import
        except OSError:
            _exit_with(
                "the working folder does not exist any more; change to another folder",
                ExitCode.USAGE_ERROR,
                code="not-found",
            )
        # Signals go to the PIDs that /proc lists: in another PID namespace, these are other processes.
        if os.path.realpath("/proc/self") != f"/proc/{os.getpid()}":
            _exit_with(
                "/proc is not mounted, or belongs to another PID namespace; mount it with `mount -t proc proc /proc`, "
                "or start the namespace with `unshare --mount-proc`",
                ExitCode.USAGE_ERROR,
                code="not-supported",
            )
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _end_by_sigint()
    except OutputError as error:
        _discard_output()
        if error.errno == errno.EPIPE:
            # The reader of a pipe closes it when it has read enough, as `head` does.
            sys.exit(ExitCode.FAILED)
        _exit_with(f"stdout cannot be written: {error.strerror}", ExitCode.FAILED, code="not-writable")
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _exit_with(
            "this process may not open more files; raise the limit with `ulimit -n 1024`",
            ExitCode.FAILED,
            code="limit-too-low",
        )


def _exit_with(message: str, exit_code: int, *, code: str) -> NoReturn:
    """Print the message and exit. The code only names the message in the catalog of the tests."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(exit_code)


def _end_by_sigint() -> None:
    """End this process by SIGINT, so that a shell script that runs it ends, too."""
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    # Not killed: the first process of a container.
    os._exit(128 + signal.SIGINT)


def _discard_output() -> None:
    """Discard what stdout could not write, which the interpreter would try again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
