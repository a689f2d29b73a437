"""Python child processes for work that this process must not do itself: importing torch or user code, calling NVML.

`HelperProcess` is the parent's side: it starts the child and reads its output with timeouts. `start_helper` starts a
module whose ``main(parent)`` answers requests through the child's side, `ParentPipe`. Requests and answers are records
of `engine.base.codec`, or lists of them, one a line.
"""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

# typing and the codec take 10 ms to import, so they are imported where they are used: the GPU sampler starts before
# everything else and needs neither.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self, TypeVar

    T = TypeVar("T")

# A killed process that is blocked in a driver or on a dead disk does not end. close() waits no longer for it.
END_SECONDS = 1.0
# Importing torch from a busy network file system can take minutes.
DEFAULT_TIMEOUT_SECONDS = 300.0
READ_BYTES = 1 << 16
STDERR_TAIL_BYTES = 1 << 16


class HelperError(Exception):
    """The helper process did not answer. The message says why."""


class HelperTimeoutError(HelperError):
    """No answer arrived within the timeout. It may still arrive later."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:.0f} s")


class HelperExitedError(HelperError):
    """The process ended or closed its output.

    `exit_code` is negative for a signal and None if the process is still running; `last_line` is the last line of its
    stderr, "" if there is none.
    """

    def __init__(self, exit_code: int | None, last_line: str) -> None:
        from engine.base.exits import exit_status

        self.exit_code, self.last_line = exit_code, last_line
        if exit_code is None:
            reason = "it closed its output but is still running"
        elif exit_code > 0 and last_line:
            reason = last_line
        else:
            reason = f"it {exit_status(exit_code)}"
        super().__init__(reason)


class HelperProcess:
    """A Python child that runs `program` with pipes for stdin and stdout.

    It runs in its own session: Ctrl-C and SIGHUP of the terminal do not reach it, and `kill` also kills its children.
    Without `keep_stderr` its stderr is discarded.
    """

    def __init__(
        self, program: str, *arguments: str, env: Mapping[str, str] | None = None, keep_stderr: bool = True
    ) -> None:
        # In memory, because `gputrain doctor` must also work on a host without a usable temporary folder.
        self._stderr = os.fdopen(os.memfd_create("stderr"), "rb") if keep_stderr else None
        self._process = subprocess.Popen(  # noqa: S603 (our own program)
            # -P: a file in the working folder must not shadow a library.
            [sys.executable, "-P", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr or subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=env,
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101 (for mypy)
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._partial_line = b""
        self._lines: deque[bytes] = deque()
        self._at_eof = False

    def send(self, request: object) -> None:
        """Send a request, which fits into the pipe (64 KiB, pipe(7)) unless the process has not read earlier ones."""
        from engine.base.codec import encode

        # A process that has ended: the next read raises HelperExitedError.
        with suppress(BrokenPipeError):
            self._stdin.write(encode(request) + b"\n")

    def receive(self, kind: type[T], timeout_s: float = math.inf) -> T:
        """Return the next answer; lines that are not JSON are skipped. Without a timeout it waits until the process
        ends. Raises the same errors as `read_lines`, and HelperError if the answer is of another kind."""
        from engine.base.codec import InvalidRecordError, ValidationError, decode

        deadline = time.monotonic() + timeout_s
        while True:
            while self._lines:
                try:
                    return decode(self._lines.popleft(), kind)
                except InvalidRecordError as error:
                    if isinstance(error.__cause__, ValidationError):
                        raise HelperError(f"its answer {error}") from error
            self._lines += self._read_until(deadline)
            if not self._lines:
                raise HelperTimeoutError(timeout_s)

    def read_lines(self, timeout_s: float) -> list[bytes]:
        """Return all complete lines that have arrived, at least one.

        Raises:
            HelperTimeoutError: no complete line arrived in time. An incomplete one is kept for the next call.
            HelperExitedError: the process ended, and all its complete lines have been returned.
        """
        lines = self._read_until(time.monotonic() + timeout_s)
        if not lines:
            raise HelperTimeoutError(timeout_s)
        return lines

    def _read_until(self, deadline: float) -> list[bytes]:
        lines: list[bytes] = []
        while not self._at_eof:
            if not self._has_output(0.0 if lines else max(deadline - time.monotonic(), 0.0)):
                return lines
            data = os.read(self._stdout.fileno(), READ_BYTES)
            self._at_eof = not data
            *complete, self._partial_line = (self._partial_line + data).split(b"\n")
            lines += complete
        if not lines:
            raise HelperExitedError(self.exit_code(END_SECONDS), self._last_stderr_line())
        return lines

    def _has_output(self, timeout_s: float) -> bool:
        """Wait for output. poll(2), because select(2) fails for descriptors from 1024 up."""
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return bool(poll.poll(None if timeout_s == math.inf else math.ceil(1000 * timeout_s)))

    def _last_stderr_line(self) -> str:
        if self._stderr is None:
            return ""
        # Parent and child share the file offset, so use pread, which does not move it.
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), STDERR_TAIL_BYTES, max(size - STDERR_TAIL_BYTES, 0))
        return (tail.decode(errors="replace").strip().splitlines() or [""])[-1]

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """Return the exit code, negative for a signal; None if the process has not ended in time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        """Kill the process and its children. Can be called from any thread; a blocked `receive` raises
        HelperExitedError."""
        # After a wait, the pid may belong to another process.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, timeout_s: float = END_SECONDS) -> None:
        """Kill the process and wait at most `timeout_s` seconds for its end."""
        self.kill()
        for stream in (self._stdin, self._stdout, self._stderr):
            if stream is not None:
                stream.close()
        self.exit_code(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_helper(module: str, *, env: Mapping[str, str] | None = None, keep_stderr: bool = True) -> HelperProcess:
    """Start a child that runs ``main(parent)`` of `module`.

    Linux kills the child when the calling thread ends, so start it from the thread that uses its answers.
    """
    program = f"from engine.base.helper_process import run_helper; run_helper({module!r})"
    return HelperProcess(program, str(os.getpid()), env=env, keep_stderr=keep_stderr)


def ask_helper(
    module: str,
    kind: type[T],
    request: object = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_SECONDS,
    env: Mapping[str, str] | None = None,
) -> T:
    """Start a helper for one request and return its answer, which is of this `kind`. Raises HelperError."""
    with start_helper(module, env=env) as helper:
        helper.send(request)
        return helper.receive(kind, timeout_s)


class ParentPipe:
    """The child's side: receive requests, send answers.

    Both pipes move to private file descriptors: what a library prints goes to stderr, and stdin is empty.
    """

    def __init__(self) -> None:
        from engine.base.process import redirect_output

        self._requests, self._answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        devnull = os.open(os.devnull, os.O_RDONLY)
        os.dup2(devnull, 0)
        os.close(devnull)
        redirect_output(None)

    def requests(self, kind: type[T]) -> Iterator[T]:
        """Yield the requests until the parent closes the pipe."""
        from engine.base.codec import decode

        return (decode(line, kind) for line in self._requests)

    def receive(self, kind: type[T]) -> T:
        """Return the next request. Raises StopIteration if the parent has closed the pipe."""
        return next(self.requests(kind))

    def send(self, answer: object) -> None:
        from engine.base.codec import encode

        self._answers.write(encode(answer) + b"\n")
        self._answers.flush()


def run_helper(module: str) -> None:
    """Run ``main(parent)`` of `module` in the child and exit. `start_helper` starts the child with this function."""
    import traceback
    from importlib import import_module

    from engine.base.process import die_with_parent, exit_now

    # Most objects that an import creates stay: frequent collections take a quarter of the time to list all models.
    gc.set_threshold(100_000)
    # Remove the argument: user code may parse sys.argv when it is imported.
    die_with_parent(int(sys.argv.pop()))
    # Before the import, because libraries print while they are imported.
    parent = ParentPipe()
    try:
        import_module(module).main(parent)
    except Exception:
        traceback.print_exc()
        exit_now(1)
    # Do not wait for library threads or for the interpreter's exit, which takes 1 s with torch loaded.
    exit_now(0)
