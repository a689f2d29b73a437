"""The trash of the runs folder: its runs with their size, to be restored or deleted for good.

Files are listed, counted, moved and deleted in threads (`engine.runs.trash`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.folder import RunFolder
from engine.runs.trash import RunContents, TrashedRun, delete_for_good, list_trash, restore_run, run_contents
from engine.show.table import fit
from engine.utils.text import pluralize, printable
from engine.utils.units import format_bytes
from tui.keymap import TRASH_COMMANDS, Command
from tui.palette import MUTED
from tui.pollers.watched import Watched
from tui.screens.base import AppServices, GputrainScreen, watch_other_hosts
from tui.screens.dialogs import TextInputDialog, confirm_dialog
from tui.screens.run_changes import check_free_name
from tui.tables import styled
from tui.tables.trash import trash_columns
from tui.widgets.lines import LazyRows, Lines

FOREVER = "This cannot be undone."


class TrashScreen(GputrainScreen):
    """Runs in the trash, the latest deletion first."""

    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = TRASH_COMMANDS

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._root = app.runs_dir
        self._contents: dict[str, RunContents] = {}
        self.poller = self.follow(Watched("trash", self._read))

    def compose_body(self) -> ComposeResult:
        lines = Lines(selectable=True, id="trash", empty_text=Text("Loading …", MUTED))
        lines.set_titles("Trash")
        yield lines

    def _read(self) -> list[TrashedRun]:
        """Return the runs in the trash, in the thread of the poller. Each is counted once."""
        runs = list_trash(self._root)
        self._contents |= {run.entry: run_contents(run.path) for run in runs if run.entry not in self._contents}
        return runs

    def _change(self, work: Callable[[], object], done: str) -> None:
        """Change the trash in a thread, then read it."""

        def read() -> None:
            self.gputrain_app.run_list_poller.request_poll()
            self.poller.request_poll()

        def succeed(_: object) -> None:
            self.gputrain_app.show_toast(done)
            read()

        self.act(work, succeed, read, in_thread=True)

    def update_content(self) -> None:
        self.show_title(f"trash of {self._root}")
        lines, runs = self.query_one("#trash", Lines), self.poller.value
        if runs is None:
            return
        table = fit(trash_columns(self._contents), runs, lines.text_width)
        rows = LazyRows([run.entry for run in runs], lambda index: styled(table.line(runs[index])))
        empty = Text("The trash is empty; D in the list of runs moves runs here", MUTED)
        lines.set_rows(rows, [styled(table.header(MUTED))], empty)
        size = format_bytes(self._total_bytes(runs))
        lines.set_titles(f"Trash: {pluralize(len(runs), 'run')}, {size}" if runs else "Trash")

    def _total_bytes(self, runs: Sequence[TrashedRun]) -> int:
        return sum(self._contents[run.entry].size_bytes for run in runs)

    def _selected(self) -> TrashedRun | None:
        key = self.query_one("#trash", Lines).selected_key
        return next((run for run in self.poller.value or () if run.entry == key), None)

    def is_available(self, action: str) -> bool:
        return action not in ("restore", "delete", "empty") or bool(self.poller.value)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        self.action_restore()

    def action_restore(self) -> None:
        """Restore the selected run, under another name if a run has its name by now."""
        run = self._selected()
        if run is None:
            return

        def restore(name: str | None) -> None:
            if name is not None:
                self._change(partial(restore_run, self._root, run, name), f"Restored {name}")

        if not (self._root / run.name).exists():
            restore(run.name)
            return
        about = f"Another run is called {printable(run.name)} by now. Restore this one as:"
        dialog = TextInputDialog("Restore a run", f"{run.name}-restored", about, partial(check_free_name, self._root))
        self.app.push_screen(dialog, restore)

    def action_delete(self) -> None:
        """Delete the selected run for good, after a question."""
        if (run := self._selected()) is not None:
            about = f"{printable(run.name)}: {self._contents[run.entry]}"
            self._ask_to_delete([run], f"Delete {printable(run.name)} for good?", f"{about}. {FOREVER}")

    def action_empty(self) -> None:
        """Delete all runs in the trash for good, after a question."""
        if runs := self.poller.value:
            checkpoints = sum(self._contents[run.entry].checkpoints for run in runs)
            about = f"{format_bytes(self._total_bytes(runs))}, {pluralize(checkpoints, 'checkpoint')}. {FOREVER}"
            self._ask_to_delete(runs, f"Delete {pluralize(len(runs), 'run')} in the trash for good?", about)

    def _ask_to_delete(self, runs: Sequence[TrashedRun], question: str, about: str) -> None:
        def delete_all() -> None:
            watch_other_hosts(self.gputrain_app, self, [RunFolder(run.path) for run in runs])
            for run in runs:
                delete_for_good(run)

        def answer(key: str | None) -> None:
            if key == "yes":
                self._change(delete_all, f"Deleted {pluralize(len(runs), 'run')} for good")

        self.app.push_screen(confirm_dialog(question, about, "Keep", "Delete for good"), answer)
