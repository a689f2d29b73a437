"""The process that tells what only torch can tell, as seen by who asks it, without torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from engine.utils.exits import signal_name

PROGRAM = "from engine.doctor.probe import main; main()"
END_SECONDS = 1.0


class NoAnswerError(Exception):
    """The process did not answer in time, or ended; the text says which."""


class TorchProcess:
    """Answers come as JSON objects, one a line. The process is the leader of a group, which `close` ends whole."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(  # noqa: S603 (our own module)
            [sys.executable, "-P", "-c", PROGRAM, str(os.getpid()), json.dumps(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )
        self._rest = b""
        self._silent: str | None = None

    def hear(self, seconds: float) -> dict[str, Any]:
        """Its next answer. Raises NoAnswerError, once and for all."""
        line = b""
        try:
            if self._silent is None:
                line = self._line(time.monotonic() + seconds)
        except TimeoutError:
            self._silent = f"no answer within {seconds:.0f} s"
        except EOFError:
            self._silent = self._end_in_words()
        if self._silent is not None:
            self.close()
            raise NoAnswerError(self._silent)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: dict[str, Any]) -> None:
        if self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(json.dumps(question).encode() + b"\n")

    def _line(self, deadline: float) -> bytes:
        """Raises TimeoutError, EOFError."""
        stream = self._process.stdout
        if stream is None:
            raise EOFError
        while b"\n" not in self._rest:
            if not select.select([stream], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                raise TimeoutError
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _end_in_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        code = self._process.returncode
        if code is not None and code < 0:
            return f"it was killed by {signal_name(-code)}"
        return last[0] if last else f"it ended with exit code {code}"

    def close(self) -> None:
        """End it and what it started. What hangs inside the driver does not die, and is not waited for."""
        # One that has ended took what it started with it, and its pid may be another's by now.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
