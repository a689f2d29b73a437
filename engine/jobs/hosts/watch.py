"""Follow several hosts in the background: `HostWatch` keeps one connection per host and returns the last readings.

On a host with gputrain it reads the lines of `gputrain gpus --watch --json` and of `gputrain runs --watch --json`, on
others those of `probe`. Each host has a thread, so none of them delays another.
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
from typing import Any

from engine.base.codec import InvalidRecordError
from engine.base.codec import replace as replace_record
from engine.base.text import printable
from engine.jobs.hosts.channel import (
    MAX_WORDS_CHARS,
    READ_BYTES,
    START_MARKER,
    HostUnreachableError,
    ask_on_terminal,
    failure_words,
    parse_hosts,
    remote_command,
    ssh_argv,
    start_ssh,
)
from engine.jobs.hosts.reading import (
    MAX_LINE_BYTES,
    MAX_RUN_BYTES,
    MAX_RUNS,
    HostReading,
    HostState,
    parse_run,
    parse_snapshot,
)
from engine.runs.run_row import UNKNOWN_STATE, RunRow

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
MAX_WORDS_BYTES = 1 << 12
# More takes this process too long. The first word of a host with long runs has one MiB.
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

_MARKER = START_MARKER.rstrip()
_PROBE = Path(__file__).with_name("probe.py")


class HostWatch:
    """Follows hosts until it is closed. Its methods may be called from any thread, and do not wait for a host.

    `runs_dir` is the folder of the runs to follow, on hosts that have it; on others it is that of `gputrain runs` in
    the home. Raises UsageError for a name that no host has.
    """

    def __init__(self, names: Sequence[str], runs_dir: Path | None = None) -> None:
        self._changed = threading.Event()
        self._links = {name: _Link(name, runs_dir, self._changed) for name in parse_hosts(names)}
        for link in self._links.values():
            link.start()

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
        self._links[name].wake.set()

    def ask(self, name: str) -> int:
        """Connect to a host on this terminal, where ssh asks for passwords and new host keys. Return its exit code.

        The screen must be suspended. A connection that succeeds is used at once.
        """
        code = ask_on_terminal(name)
        self.retry(name)
        return code

    def close(self) -> None:
        """End all connections."""
        for link in self._links.values():
            link.close()
        deadline = time.monotonic() + 2 * END_SECONDS
        for link in self._links.values():
            link.join(max(deadline - time.monotonic(), 0.0))


class _Link(threading.Thread):
    """Keeps the connection to one host: connects, reads what it says, and connects again when that ends."""

    def __init__(self, name: str, runs_dir: Path | None, changed: threading.Event) -> None:
        super().__init__(name=f"host {name}", daemon=True)
        self.reading = HostReading(name)
        self.wake = threading.Event()
        """Ends the pause before the next attempt."""
        self._runs_dir, self._changed = runs_dir, changed
        self._is_closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._heard_at: float | None = None
        """When the host said something that was understood."""

    def close(self) -> None:
        """Request the end of the connection and of the thread."""
        self._is_closed = True
        self.wake.set()
        if (process := self._process) is not None:
            process.terminate()

    def run(self) -> None:
        while not self._is_closed:
            self.wake.clear()
            self._active_at = self._connected_at = time.monotonic()
            self._words, self._note, self._has_started, self._has_all_rows = b"", "", False, False
            self._rows: dict[str, RunRow] = {}
            retry_at = self._follow()
            while not self.wake.wait(min(max(retry_at - time.monotonic(), 0.0), TICK_SECONDS)):
                if time.monotonic() >= retry_at:
                    break
                self._grow_old()

    def _follow(self) -> float:
        """Follow the host until the connection ends. Return when to connect again, on the monotonic clock; infinite if
        only a person can help."""
        command = remote_command([str(self._runs_dir or "")], _SCRIPT)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        try:
            # In its own session: Ctrl-C at a question of another ssh, or in a shell, is not for it.
            process = start_ssh(ssh_argv(self.reading.name, command, shares=True), start_new_session=True, **pipes)
        except HostUnreachableError as error:
            return self._fail(str(error))
        self._process = process
        with process:
            assert process.stdin is not None  # noqa: S101 (for mypy)
            # It fits into the pipe, whether ssh reads it or not.
            with suppress(OSError), process.stdin as stdin:
                stdin.write(_PROBE.read_bytes())
            try:
                return self._read(process)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                process.kill()

    def _read(self, process: subprocess.Popen[bytes]) -> float:
        """Read what the host says. Return when to connect again."""
        assert process.stdout is not None and process.stderr is not None  # noqa: S101 (for mypy)
        lacks_folder = self._runs_dir is not None and not self._runs_dir.is_dir()
        tick_at, tick_bytes = 0.0, 0
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, (bytearray(), self._take_answer, MAX_LINE_BYTES))
            selector.register(process.stderr, selectors.EVENT_READ, (bytearray(), self._take_runs, MAX_RUN_BYTES))
            while not self._is_closed:
                ready, now = selector.select(TICK_SECONDS), time.monotonic()
                if now - tick_at > TICK_SECONDS:
                    tick_at, tick_bytes = now, 0
                # What ssh says before it ends comes first.
                for key, _ in sorted(ready, key=lambda event: event[0].fileobj is process.stdout):
                    rest, take, max_bytes = key.data
                    data = os.read(key.fd, READ_BYTES)
                    rest += data
                    tick_bytes += len(data)
                    if b"\n" in data:
                        *lines, rest[:] = bytes(rest).split(b"\n")
                        take(lines)
                    if not data and key.fileobj is process.stdout:
                        return self._fail(self._end_reason(process))
                    if not data:
                        selector.unregister(key.fd)
                    if len(rest) > max_bytes:
                        return self._fail(f"its answer has a line of more than {len(rest) >> 10} KiB")
                if tick_bytes > MAX_BYTES_PER_TICK:
                    return self._fail(f"its answers have more than {MAX_BYTES_PER_TICK >> 20} MiB a second")
                if now - self._active_at > GIVEN_UP_SECONDS:
                    return self._fail(f"no answer for {GIVEN_UP_SECONDS:.0f} s")
                if lacks_folder and self._runs_dir is not None and self._runs_dir.is_dir():
                    # Hosts that share it follow another one. What is known stays.
                    return now
                self._grow_old()
        return now

    def _take_answer(self, lines: list[bytes]) -> None:
        """Take the last snapshot among lines of stdout. Lines before the marker are noise."""
        if not self._has_started and _MARKER in lines:
            self._has_started = True
            lines = lines[lines.index(_MARKER) + 1 :]
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
        self._has_all_rows |= not has_gputrain
        is_late = not self._has_all_rows and self._heard_at - self._connected_at > STALE_SECONDS
        self._set(
            state=HostState.OK,
            reason=snapshot.error or self._note or (LATE_RUNS if is_late else ""),
            age_s=None,
            snapshot=snapshot,
            has_all_rows=self._has_all_rows,
            has_gputrain=has_gputrain,
            must_ask=False,
        )

    def _take_runs(self, lines: list[bytes]) -> None:
        """Take the runs among lines of stderr; others are words of ssh and of rc files."""
        for line in lines:
            if line == _MARKER:
                self._words = b""
            elif line == NO_RUNS.encode():
                self._note, self._has_all_rows = f"{NO_RUNS}: {failure_words(self._words, None)}", True
            elif line.startswith(b'{"format"'):
                self._take_run(line)
            else:
                self._words = (self._words + line + b"\n")[-MAX_WORDS_BYTES:]
        if self._has_all_rows:
            rows = sorted(self._rows.values(), key=lambda row: (-(row.record.started_at or 0.0), row.name))
            reason = self.reading.reason or (self._note if self.reading.state is HostState.OK else "")
            self._set(rows=tuple(rows), has_all_rows=True, reason=reason)

    def _take_run(self, line: bytes) -> None:
        try:
            news = parse_run(line)
        except InvalidRecordError as error:
            self._note = f"a run of it {error}"
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
        return failure_words(self._words, code)

    def _fail(self, reason: str) -> float:
        """Say why the connection has ended. Return when to connect again."""
        must_ask = not self._has_started and any(words in self._words for words in ASKS)
        self._set(must_ask=must_ask)
        self._set_old(HostState.DOWN, reason)
        pause_s = PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS) - 1)]
        self._failures += 1
        return math.inf if must_ask and _WAITS_FOR_PERSON in self._words else time.monotonic() + pause_s

    def _grow_old(self) -> None:
        """Say for how long the host has been silent."""
        reading, now = self.reading, time.monotonic()
        if self._heard_at is None:
            silence_s = int(now - self._connected_at)
            reason = f"no answer for {silence_s} s"
            if reading.state is HostState.CONNECTING and silence_s >= STALE_SECONDS and reading.reason != reason:
                self._set(reason=reason)
        elif reading.state is HostState.OK and now - self._heard_at > STALE_SECONDS:
            self._set_old(HostState.STALE, "no news")
        elif reading.age_s not in (None, int(now - self._heard_at)):
            self._set_old(reading.state, reading.reason)

    def _set_old(self, state: HostState, reason: str) -> None:
        """Say how old the last word is. Of its GPUs only what does not change is still known, and of its live runs
        nothing."""
        snapshot, age_s, rows = self.reading.snapshot, None, self.reading.rows
        if self._heard_at is not None and snapshot is not None:
            age = time.monotonic() - self._heard_at
            age_s = int(age)
            snapshot = replace_record(snapshot, gpus=tuple(gpu.as_stale(age) for gpu in snapshot.gpus))
            if any(row.live for row in rows):
                message = (
                    f"was {{}} at {time.strftime('%H:%M', time.localtime(time.time() - age))}; its host is {state}"
                )
                rows = tuple(
                    row._replace(state=UNKNOWN_STATE, message=message.format(row.state)) if row.live else row
                    for row in rows
                )
        self._set(state=state, reason=reason, age_s=age_s, snapshot=snapshot, rows=rows)

    def _set(self, **changes: Any) -> None:
        """Publish a changed reading."""
        if "reason" in changes:
            changes["reason"] = printable(changes["reason"])[:MAX_WORDS_CHARS]
        self.reading = replace(self.reading, **changes)
        self._changed.set()
