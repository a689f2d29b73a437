"""`gputrain gpus`: print GPU snapshots once or repeatedly, as a table or as JSON, and record them to a file."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from engine.base.codec import encode
from engine.base.errors import UsageError
from engine.base.files import expand_user
from engine.gpus.monitor import GpuMonitor, open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.start_sampler import MIN_PERIOD_SECONDS
from tui.cli.console import json_line, print_json, table_console, until_unread

if TYPE_CHECKING:
    from rich.live import Live

# The sampler reports an unresponsive GPU after two seconds, but may take longer to start.
FIRST_SNAPSHOT_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True)
class GpusOptions:
    """Options of `gputrain gpus`. `samples` limits the number of snapshots; without `watch` and `record` it is one."""

    json: bool
    watch: bool
    processes: bool
    links: bool
    interval_s: float
    samples: int | None
    record: str | None

    @property
    def sample_count(self) -> int | None:
        return self.samples if self.watch or self.record or self.samples else 1


def show_gpus(options: GpusOptions) -> None:
    """Print snapshots until the requested number or Ctrl-C. Raises UsageError."""
    # CPU usage of a process is a difference between two samples, so the first sample has none.
    quick = options.sample_count == 1 and options.processes
    monitor = open_monitor(SamplerOptions(period=MIN_PERIOD_SECONDS if quick else options.interval_s))
    try:
        with until_unread(), _open_recording(options.record) as record:
            if quick:
                monitor.read(FIRST_SNAPSHOT_TIMEOUT_SECONDS)
            _show_samples(options, monitor, record)
    finally:
        monitor.close()


def _show_samples(options: GpusOptions, monitor: GpuMonitor, record: BinaryIO | None) -> None:
    output = _SnapshotPrinter(options)
    reported_error: str | None = None
    remaining = options.sample_count
    with output:
        while remaining is None or remaining > 0:
            snapshot = _next_snapshot(monitor, options)
            if snapshot.error is not None and snapshot.error != reported_error:
                from tui.screens.phrases import no_driver_problem

                typer.echo(str(no_driver_problem(snapshot)), err=True)
            reported_error = snapshot.error
            if record is not None:
                record.write(encode(snapshot) + b"\n")
                record.flush()
            output.show(snapshot)
            remaining = None if remaining is None else remaining - 1


def _next_snapshot(monitor: GpuMonitor, options: GpusOptions) -> Snapshot:
    """Return the next snapshot, or the latest one again if the sampler does not answer."""
    timeout_s = FIRST_SNAPSHOT_TIMEOUT_SECONDS if monitor.latest() is None else max(options.interval_s, 1.0) + 1.0
    latest = monitor.read(timeout_s) or monitor.latest()
    if latest is None:
        raise UsageError.one(
            "gpus",
            f"{socket.gethostname()}: no snapshot from the sampler within {timeout_s:.0f} s",
            code="timed-out",
        )
    return latest


class _SnapshotPrinter:
    """Prints snapshots as JSON or as a table; `--watch` redraws the table in place on a terminal."""

    def __init__(self, options: GpusOptions) -> None:
        self._options = options
        self._in_place = options.watch and not options.json and sys.stdout.isatty()
        self._record_only = options.record is not None and not options.watch and not options.json
        self._live: Live | None = None

    def __enter__(self) -> _SnapshotPrinter:
        if self._record_only:
            typer.echo(f"Recording to {self._options.record}. Press Ctrl-C to stop.", err=True)
        if not self._options.json and not self._record_only:
            from rich.live import Live

            self._console = table_console()
            self._live = Live(console=self._console, auto_refresh=False) if self._in_place else None
            if self._live is not None:
                self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        if self._record_only:
            return
        if self._options.json:
            if self._options.sample_count == 1:
                print_json(snapshot)
            else:
                typer.echo(json_line(snapshot))
            return
        from tui.screens.tables import joined
        from tui.screens.tables.processes import snapshot_lines

        width, processes = self._console.width, self._options.processes
        lines = snapshot_lines(snapshot, width, instances=True, processes=processes)
        if self._live is not None and len(lines) > self._console.height:
            # Rather all GPUs than the instances of the first ones.
            lines = snapshot_lines(snapshot, width, instances=False, processes=processes)
        if self._live is None:
            for line in lines:
                self._console.print(line, soft_wrap=True)
        else:
            self._live.update(joined(lines), refresh=True)


@contextmanager
def _open_recording(path: str | None) -> Iterator[BinaryIO | None]:
    """Create the recording file. Raises UsageError if it exists or cannot be written."""
    if path is None:
        yield None
        return
    try:
        with Path(expand_user(path)).open("xb") as file:
            yield file
    except FileExistsError as error:
        raise UsageError.one("--record", f"{path} exists; use another file or remove it", code="name-in-use") from error
    except OSError as error:
        raise UsageError.one("--record", f"{path} cannot be written: {error.strerror}", code="not-writable") from error
