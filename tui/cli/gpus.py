"""`gputrain gpus`: print GPU snapshots once or repeatedly, as a table or as JSON, and record them to a file."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from engine.base.codec import encode
from engine.base.errors import UsageError
from engine.base.files import expand_user
from engine.gpus.monitor import GpuMonitor, open_monitor
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.start_sampler import MIN_PERIOD_SECONDS
from tui.cli.console import json_line, print_json, show_frames, table_console, until_unread

if TYPE_CHECKING:
    from rich.text import Text

# The sampler reports an unresponsive GPU after two seconds, but may take longer to start.
FIRST_SNAPSHOT_TIMEOUT_SECONDS = 10.0


def show_gpus(
    *, as_json: bool, watch: bool, processes: bool, interval_s: float, count: int | None, record: str | None
) -> None:
    """Print snapshots until Ctrl-C, or `count` of them; without `watch` and `record` one. Raises UsageError."""
    count = count if watch or record or count else 1
    # CPU usage of a process is a difference between two samples, so the first sample has none.
    quick = count == 1 and processes
    monitor = open_monitor(SamplerOptions(period=MIN_PERIOD_SECONDS if quick else interval_s))
    with closing(monitor), until_unread(), _open_recording(record) as file:
        if quick:
            monitor.read(FIRST_SNAPSHOT_TIMEOUT_SECONDS)
        snapshots = _snapshots(monitor, interval_s, count, file)
        if as_json and count == 1:
            print_json(next(snapshots))
        elif as_json:
            for snapshot in snapshots:
                typer.echo(json_line(snapshot))
        elif record is not None and not watch:
            typer.echo(f"Recording to {record}. Press Ctrl-C to stop.", err=True)
            for _ in snapshots:
                pass
        else:
            _show_tables(snapshots, processes=processes, in_place=watch and sys.stdout.isatty())


def _show_tables(snapshots: Iterator[Snapshot], *, processes: bool, in_place: bool) -> None:
    from tui.screens.tables.processes import snapshot_lines

    console = table_console()

    def lines_of(snapshot: Snapshot) -> list[Text]:
        lines = snapshot_lines(snapshot, console.width, instances=True, processes=processes)
        if not in_place or len(lines) <= console.height:
            return lines
        # Rather all GPUs than the instances of the first ones.
        return snapshot_lines(snapshot, console.width, instances=False, processes=processes)

    show_frames(console, map(lines_of, snapshots), in_place=in_place)


def _snapshots(
    monitor: GpuMonitor, interval_s: float, count: int | None, record: BinaryIO | None
) -> Iterator[Snapshot]:
    """Yield snapshots and record them: the next one, or the latest one again if the sampler does not answer."""
    reported_error: str | None = None
    for _ in itertools.repeat(None) if count is None else range(count):
        timeout_s = FIRST_SNAPSHOT_TIMEOUT_SECONDS if monitor.latest() is None else max(interval_s, 1.0) + 1.0
        snapshot = monitor.read(timeout_s) or monitor.latest()
        if snapshot is None:
            reason = f"{socket.gethostname()}: no snapshot from the sampler within {timeout_s:.0f} s"
            raise UsageError.one("gpus", reason, code="timed-out")
        if snapshot.error is not None and snapshot.error != reported_error:
            from tui.screens.phrases import no_driver_problem

            typer.echo(str(no_driver_problem(snapshot)), err=True)
        reported_error = snapshot.error
        if record is not None:
            record.write(encode(snapshot) + b"\n")
            record.flush()
        yield snapshot


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
