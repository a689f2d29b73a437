"""Follow several hosts in the background: `HostWatch` keeps one connection per host and returns the last readings.

On a host with gputrain it reads the lines of `gputrain gpus --watch --json` and of `gputrain runs --watch --json`, on
others those of `probe`. One thread serves all hosts, so none of them delays another.
"""

from __future__ import annotations

import math
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from engine.hosts.channel import (
    MAX_WORDS_CHARS,
    START_MARKER,
    HostUnreachableError,
    failure_words,
    parse_hosts,
    remote_command,
    remote_script,
    ssh_argv,
    start_ssh,
)
from engine.hosts.reading import (
    MAX_LINE_BYTES,
    MAX_RUN_BYTES,
    MAX_RUNS,
    HostReading,
    HostState,
    parse_run,
    parse_snapshot,
)
from engine.runs.run_row import RunRow
from engine.utils.codec import InvalidRecordError
from engine.utils.codec import replace as replace_record
from engine.utils.text import printable

FIRST_WORD_SECONDS = 15.0
INTERVAL_SECONDS = 2  # between two samples of a host with gputrain
# A host without gputrain sends a sample every 5 s.
STALE_SECONDS = 10.0
# Silence after which a connection ends, also while it is made: with 2 s for each packet that takes 40 s.
GIVEN_UP_SECONDS = 60.0
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 5.0)  # before the next attempts
TICK_SECONDS = 1.0
END_SECONDS = 1.0
EXIT_CODE_SECONDS = 0.2  # between the end of the answer and that of ssh
READ_BYTES = 1 << 16
MAX_WORDS_BYTES = 1 << 12
# More keeps this thread from serving other hosts. The first word of a host with long runs has one MiB.
MAX_BYTES_PER_TICK = 1 << 23
# What ssh says when it would ask for something; it has no exit codes for that.
ASKS = (b"Permission denied", b"Host key verification failed")
# sshd may lock out who fails to log in again and again, so this waits for a person.
_WAITS_FOR_PERSON = ASKS[0]
_NOT_FOUND = 127  # exit code of a shell
NO_RUNS = "its runs are unknown"  # an older gputrain does not follow them
LATE_RUNS = "its runs are not listed yet"
# GPUs come through stdout and runs through stderr: lines of two programs mix in one pipe, pipe(7).
_SCRIPT = (
    'if command -v gputrain > /dev/null; then if [ -d "$1" ]; then set -- --runs-dir "$1"; else set --; fi; '
    f'{{ gputrain runs --watch --json -n {MAX_RUNS} "$@"; printf "\\n{NO_RUNS}\\n"; }} >&2 < /dev/null & '
    f"exec gputrain gpus --watch --json --interval {INTERVAL_SECONDS} < /dev/null; else exec python3 -; fi"
)


_PROBE = Path(__file__).with_name("probe.py")


class HostWatch:
    """Follows hosts until it is closed. Its methods may be called from any thread, and do not wait for a host.

    `runs_dir` is the folder of the runs to follow, on hosts that have it; on others it is that of `gputrain runs` in
    the home. Raises UsageError for a name that no host has.
    """

    def __init__(self, names: Sequence[str], runs_dir: Path | None = None) -> None:
        command = remote_script(_SCRIPT, [str(runs_dir or "")])
        self._links = {name: _Link(name, command) for name in parse_hosts(names)}
        self._runs_dir = runs_dir
        self._has_runs_dir = self._find_runs_dir()
        self._changed = threading.Event()
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def readings(self) -> tuple[HostReading, ...]:
        """Return what each host has said, in the order of the names."""
        return tuple(link.reading for link in self._links.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait until a reading changes, and return whether one did since the last call."""
        has_changed = self._changed.wait(timeout_s)
        self._changed.clear()
        return has_changed

    def first_readings(self, timeout_s: float = FIRST_WORD_SECONDS) -> tuple[HostReading, ...]:
        """Return the readings as soon as each host has said all or failed, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while any(reading.is_awaited for reading in self.readings()) and time.monotonic() < deadline:
            self.wait(max(deadline - time.monotonic(), 0.0))
        return self.readings()

    def retry(self, name: str) -> None:
        """Connect to a host that is down now, and not after the pause."""
        self._links[name].retry_at = 0.0
        self._wake()

    def ask(self, name: str) -> int:
        """Connect to a host on this terminal, where ssh asks for passwords and new host keys. Return its exit code.

        The screen must be suspended. A connection that succeeds is used at once.
        """
        with start_ssh(ssh_argv(name, remote_command(["true"], marker=False), ask=True)) as process:
            code = process.wait()
        self.retry(name)
        return code

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._wake()
        self._thread.join(END_SECONDS)

    def _find_runs_dir(self) -> bool:
        return self._runs_dir is None or self._runs_dir.is_dir()

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        try:
            while not self._closed:
                now = time.monotonic()
                if not self._has_runs_dir and self._find_runs_dir():
                    # Hosts that share it follow another one.
                    self._has_runs_dir = True
                    for link in self._links.values():
                        link.reconnect(self._selector)
                for link in self._links.values():
                    if link.advance(now, self._selector):
                        self._changed.set()
                for key, _ in self._selector.select(TICK_SECONDS):
                    if key.data is None:
                        os.read(self._wake_reader, READ_BYTES)
                    elif key.data.receive(key.fileobj, self._selector):
                        self._changed.set()
        finally:
            for link in self._links.values():
                link.disconnect(self._selector)
            deadline = time.monotonic() + END_SECONDS
            for link in self._links.values():
                link.end(deadline)
            self._selector.close()
            os.close(self._wake_reader)
            os.close(self._wake_writer)


class _Link:
    """The connection to one host, which `HostWatch` serves in its thread."""

    def __init__(self, name: str, command: str) -> None:
        self.reading = HostReading(name)
        # When it connects, on the monotonic clock; infinite if only a person can help.
        self.retry_at = 0.0
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        # When the host said something that was understood; and that, or when the connection began.
        self._heard_at: float | None = None
        self._active_at = self._connected_at = 0.0
        self._ended: list[subprocess.Popen[bytes]] = []
        self._clear()

    def _clear(self) -> None:
        """Forget what belongs to a connection."""
        self._answer, self._runs, self._words, self._note = bytearray(), bytearray(), bytearray(), ""
        self._rows: dict[str, RunRow] = {}
        self._has_all_rows = False
        self._has_started, self._tick_at, self._tick_bytes = False, 0.0, 0

    def advance(self, now: float, selector: selectors.BaseSelector) -> bool:
        """Connect if it is time to, and find out how old the last word is. Return whether the reading has changed."""
        previous = self.reading
        if self._process is None and now >= self.retry_at:
            self._connect(now, selector)
        elif self._process is not None and now - self._active_at > GIVEN_UP_SECONDS:
            self._fail(f"no answer for {GIVEN_UP_SECONDS:.0f} s", selector)
        if self._heard_at is not None:
            if self.reading.state is HostState.OK and now - self._heard_at > STALE_SECONDS:
                self._set_old(HostState.STALE, "no news")
            elif self.reading.age_s not in (None, int(now - self._heard_at)):
                self._set_old(self.reading.state, self.reading.reason)
        return self.reading is not previous

    def _connect(self, now: float, selector: selectors.BaseSelector) -> None:
        self.end(now)
        self._clear()
        self._active_at = self._connected_at = now
        command = ssh_argv(self.reading.name, self._command, master=True)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # In its own session: Ctrl-C at a question of another ssh, or in a shell, is not for it.
            self._process = process = start_ssh(command, start_new_session=True, **pipes)
        except HostUnreachableError as error:
            self._fail(str(error), selector)
            return
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: S101
        # It fits into the pipe, whether ssh reads it or not.
        with suppress(OSError), process.stdin as stdin:
            stdin.write(_PROBE.read_bytes())
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, self)

    def receive(self, stream: IO[bytes], selector: selectors.BaseSelector) -> bool:
        """Read what has arrived through stdout or stderr. Return whether the reading has changed."""
        previous, process = self.reading, self._process
        if process is None:
            # An earlier stream has ended the connection.
            return False
        is_answer = stream is process.stdout
        buffer = self._answer if is_answer else self._runs
        data = os.read(stream.fileno(), READ_BYTES)
        buffer += data
        if b"\n" in data:
            *lines, rest = bytes(buffer).split(b"\n")
            buffer[:] = rest
            (self._take_answer if is_answer else self._take_runs)(lines)
        if not data:
            selector.unregister(stream)
            if is_answer:
                self._fail(self._end_reason(process), selector)
        elif len(buffer) > (MAX_LINE_BYTES if is_answer else MAX_RUN_BYTES):
            self._fail(f"its answer has a line of more than {len(buffer) >> 10} KiB", selector)
        elif self._is_flood(len(data)):
            self._fail(f"its answers have more than {MAX_BYTES_PER_TICK >> 20} MiB a second", selector)
        return self.reading is not previous

    def _is_flood(self, size: int) -> bool:
        now = time.monotonic()
        if now - self._tick_at > TICK_SECONDS:
            self._tick_at, self._tick_bytes = now, 0
        self._tick_bytes += size
        return self._tick_bytes > MAX_BYTES_PER_TICK

    def _take_answer(self, lines: list[bytes]) -> None:
        """Take the last snapshot among lines of stdout. Lines before the marker are noise."""
        marker = START_MARKER.rstrip()
        if not self._has_started and marker in lines:
            self._has_started = True
            lines = lines[lines.index(marker) + 1 :]
        if not self._has_started or not lines:
            return
        try:
            snapshot = parse_snapshot(lines[-1])
        except InvalidRecordError as error:
            self._set_old(HostState.DOWN, f"its answer {error}")
            return
        self._failures = 0
        self._active_at = self._heard_at = time.monotonic()
        has_gputrain = lines[-1].startswith(b'{"format"')
        has_all_rows = self._has_all_rows or not has_gputrain
        is_late = not has_all_rows and self._heard_at - self._connected_at > STALE_SECONDS
        self.reading = replace(
            self.reading,
            state=HostState.OK,
            reason=printable(snapshot.error or self._note or (LATE_RUNS if is_late else ""))[:MAX_WORDS_CHARS],
            age_s=None,
            snapshot=snapshot,
            has_all_rows=has_all_rows,
            has_gputrain=has_gputrain,
            must_ask=False,
        )

    def _take_runs(self, lines: list[bytes]) -> None:
        """Take the runs among lines of stderr; others are words of ssh and of rc files."""
        for line in lines:
            if line == NO_RUNS.encode():
                self._note, self._has_all_rows = f"{NO_RUNS}: {failure_words(bytes(self._words), None)}", True
            elif line.startswith(b'{"format"'):
                self._take_run(line)
            else:
                self._words = (self._words + line + b"\n")[-MAX_WORDS_BYTES:]
        if self._has_all_rows:
            rows = sorted(self._rows.values(), key=lambda row: (-(row.record.started_at or 0.0), row.name))
            reason = (self.reading.reason or self._note) if self.reading.state is HostState.OK else self.reading.reason
            self.reading = replace(self.reading, rows=tuple(rows), has_all_rows=True, reason=reason)

    def _take_run(self, line: bytes) -> None:
        try:
            news = parse_run(line)
        except InvalidRecordError as error:
            self._note = printable(f"a run of it {error}")
            return
        if isinstance(news, RunRow):
            if news.name in self._rows or len(self._rows) < MAX_RUNS:
                self._rows[news.name] = news._replace(name=f"{self.reading.name}:{news.name}")
        elif news.gone is not None:
            self._rows.pop(news.gone, None)
        else:
            self._has_all_rows = True

    def _end_reason(self, process: subprocess.Popen[bytes]) -> str:
        """Return why ssh has closed its output, in its words."""
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(EXIT_CODE_SECONDS)
        if code == _NOT_FOUND:
            return "it has neither gputrain nor python3"
        with suppress(OSError, ValueError):
            assert process.stderr is not None  # noqa: S101 (for mypy)
            self._words += self._runs + os.read(process.stderr.fileno(), READ_BYTES)
        return failure_words(bytes(self._words), code)

    def _fail(self, reason: str, selector: selectors.BaseSelector) -> None:
        """End the connection, and say why."""
        must_ask = not self._has_started and any(words in self._words for words in ASKS)
        is_refused = must_ask and _WAITS_FOR_PERSON in self._words
        pause_s = PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS) - 1)]
        self._failures += 1
        self.retry_at = math.inf if is_refused else time.monotonic() + pause_s
        self.disconnect(selector)
        self._set_old(HostState.DOWN, reason)
        self.reading = replace(self.reading, must_ask=must_ask)

    def _set_old(self, state: HostState, reason: str) -> None:
        """Say how old the last word is. Of its GPUs only what does not change is still known."""
        snapshot, age_s = self.reading.snapshot, None
        if self._heard_at is not None and snapshot is not None:
            age = time.monotonic() - self._heard_at
            age_s = int(age)
            snapshot = replace_record(snapshot, gpus=tuple(gpu.as_stale(age) for gpu in snapshot.gpus))
        reason = printable(reason)[:MAX_WORDS_CHARS]
        self.reading = replace(self.reading, state=state, reason=reason, age_s=age_s, snapshot=snapshot)

    def reconnect(self, selector: selectors.BaseSelector) -> None:
        """Connect anew, unless there is no connection. What is known stays."""
        if self._process is not None:
            self.disconnect(selector)
            # Until then, ssh removes its control socket.
            self.retry_at = time.monotonic() + PAUSES_SECONDS[0]

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Request the end of ssh, which takes its control socket with it."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                with suppress(KeyError):
                    selector.unregister(stream)
                stream.close()
        process.terminate()
        self._ended.append(process)

    def end(self, deadline: float) -> None:
        """End each ssh that was asked to end, by force after a deadline."""
        for process in self._ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            process.kill()
        self._ended.clear()
