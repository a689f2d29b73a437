"""`gputrain gpus --hosts` and `gputrain runs --hosts`: the GPUs and the runs of other hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from engine.base.codec import replace, to_builtins
from engine.base.exit_codes import ExitCode
from engine.base.text import list_names
from engine.jobs.hosts.channel import parse_hosts
from engine.jobs.hosts.reading import HostReading, HostState, list_rows
from engine.jobs.hosts.watch import HostWatch
from tui.cli.console import is_read_for, json_line, print_json, print_lines, show_frames, table_console, until_unread
from tui.screens.tables.hosts import state_text
from tui.screens.tables.processes import snapshot_lines
from tui.terminal.palette import BAD

WATCH_SECONDS = 1.0
PATIENCE_SECONDS = 1.0


def show_host_gpus(names: str, *, as_json: bool, watch: bool, processes: bool) -> None:
    """Print the GPUs of hosts, with `watch` until Ctrl-C. Exits with 1 if no host has answered."""
    with closing(HostWatch(parse_hosts(names))) as hosts, until_unread():
        readings = await_hosts(hosts)
        if watch and as_json:
            _print_changes(hosts)
        elif watch:
            _redraw(hosts, processes=processes)
        elif as_json:
            print_json({"hosts": [_to_json(reading) for reading in readings]})
        else:
            console = table_console()
            print_lines(console, host_lines(readings, console.width, processes=processes))
        exit_unless_any(readings)


def await_hosts(hosts: HostWatch) -> tuple[HostReading, ...]:
    """Return the first readings of hosts. On a terminal, name those that take long."""
    readings = hosts.first_readings(PATIENCE_SECONDS)
    if (awaited := [reading.name for reading in readings if reading.is_awaited]) and sys.stderr.isatty():
        typer.echo(f"Waiting for {list_names(awaited)} …", err=True)
    return hosts.first_readings() if awaited else readings


def _print_changes(hosts: HostWatch) -> None:
    shown: tuple[HostReading, ...] = ()
    while True:
        readings = hosts.readings()
        for reading in readings:
            if not any(reading is other for other in shown):
                typer.echo(json_line(_to_json(reading)))
        shown = readings
        if not is_read_for(WATCH_SECONDS):
            return


def _redraw(hosts: HostWatch, *, processes: bool) -> None:
    console = table_console()

    def frames() -> Iterator[Iterator[Text]]:
        while is_read_for(WATCH_SECONDS):
            yield host_lines(hosts.readings(), console.width, processes=processes)

    show_frames(console, frames(), in_place=sys.stdout.isatty())


def _to_json(reading: HostReading) -> dict[str, Any]:
    fields = ("name", "state", "reason", "age_s", "has_gputrain", "must_ask")
    snapshot = None if reading.snapshot is None else to_builtins(reading.snapshot)
    return {**{name: getattr(reading, name) for name in fields}, "snapshot": snapshot}


def host_lines(readings: Sequence[HostReading], width: int, *, processes: bool) -> Iterator[Text]:
    """Yield the lines of the GPUs of hosts: those of each below its name, and why it says nothing."""
    for index, reading in enumerate(readings):
        if index:
            yield Text("")
        if reading.state is not HostState.OK or reading.reason:
            yield Text.assemble(f"{reading.name}   ", (state_text(reading), BAD))
        if reading.snapshot is not None:
            # A host calls itself what it likes.
            snapshot = replace(reading.snapshot, host=reading.name)
            yield from snapshot_lines(snapshot, width, instances=True, processes=processes)


def exit_unless_any(readings: Sequence[HostReading]) -> None:
    """Exit with 1 if no host has answered."""
    if not any(reading.state is HostState.OK for reading in readings):
        raise typer.Exit(ExitCode.FAILED)


class HostRuns:
    """The runs of hosts as `engine.runs.run_list.RunList` has those of a folder. A run is named HOST:RUN.

    With `follow`, a poll finds out what has changed. Exits with 1 if no host has answered.
    """

    def __init__(self, names: str, root: Path, *, follow: bool) -> None:
        self._watch = HostWatch(parse_hosts(names), root)
        readings = await_hosts(self._watch)
        self.rows = list_rows(readings)
        for reading in readings:
            if text := state_text(reading):
                typer.echo(f"{reading.name}: {text}", err=True)
        if not follow:
            self._watch.close()
        exit_unless_any(readings)

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.rows)

    def poll(self, max_seconds: float) -> None:
        """Take the rows as they are now. The same row object tells that nothing has changed."""
        if self._watch.wait(0.0):
            self.rows = list_rows(self._watch.readings())
