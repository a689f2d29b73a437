"""The screen: the runs of this folder, live."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import typer
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Static

from engine.problems import UsageError
from engine.runs import all_runs, runs_root
from tui.cli import RunsDir, usage_errors
from tui.runs_table import HEADER, RunRow, cells_of, describe_run

REFRESH_SECONDS = 1.0


class CockpitApp(App[None]):
    """A table of the runs below a folder, read again once a second in a thread of its own."""

    TITLE = "gputrain"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit")]

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def compose(self) -> ComposeResult:
        yield Static(f" gputrain   runs in {self._root}", id="title", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Static("", id="message", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*HEADER)
        self.set_interval(REFRESH_SECONDS, self._look)
        self._look()

    def _look(self) -> None:
        # In a thread, so that a slow disk holds up no key, and one at a time, so that readers do not pile up.
        if not any(worker.is_running for worker in self.workers):
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        try:
            rows = [describe_run(folder) for folder in all_runs(self._root)]
        except UsageError as error:
            self.call_from_thread(self._show, [], str(error))
            return
        empty = f"There are no runs in {self._root}. Start one: gputrain run --headless digits"
        self.call_from_thread(self._show, rows, "" if rows else empty)

    def _show(self, rows: list[RunRow], message: str) -> None:
        table = self.query_one(DataTable)
        cursor = table.cursor_row
        table.clear()
        # As Text, because a plain string would be read as markup.
        table.add_rows([Text(cell) for cell in cells_of(row)] for row in rows)
        table.move_cursor(row=cursor)
        self.query_one("#message", Static).update(f" {message}")


def screen(runs_dir: RunsDir = None) -> None:
    """Watch the runs of a folder, live. q quits; the runs go on."""
    with usage_errors():
        root = runs_root(runs_dir)
    if not sys.stdout.isatty():
        typer.echo("error: gputrain-tui needs a terminal; without one, list the runs with `gputrain runs`", err=True)
        raise typer.Exit(2)
    CockpitApp(root).run()


def run() -> None:
    command = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    command.command()(screen)
    command()
