"""The screen of the queue: what waits for GPUs on this host, of all users, and keys that change the place of own runs.

`tui.screens.pollers.files` reads the queue, and `engine.jobs.queue.edit` changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container

from engine.base.errors import Problem, UsageError
from engine.base.text import list_names, printable
from engine.gpus.selection import CPU
from engine.jobs.queue.listing import QueueRow, RowState
from engine.report.table import fit
from engine.runs.folder import RunFolder
from tui.screens.base import GputrainScreen, watch_other_hosts
from tui.screens.dialogs import confirm
from tui.screens.keymap import QUEUE_KEYS, Key
from tui.screens.pollers.files import QueueReader
from tui.screens.pollers.watched import Watched
from tui.screens.services import AppServices
from tui.screens.tables import styled, wrap_text
from tui.screens.tables.queue import (
    SCREEN_COLUMNS,
    describe_row,
    mark_kept,
    queue_devices,
    queue_title,
    queued_runs,
    strip_lines,
)
from tui.screens.widgets.lines import KeyedRow, Lines
from tui.terminal.palette import BAD, MUTED

NOTHING_WAITS = "No run waits. `gputrain run CONFIG --ngpu 2 --queue --detach` starts one."


class QueueScreen(GputrainScreen):
    """Lists the queue; its keys change the place of the selected run, which must be one of this user."""

    CSS_PATH = "queue.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = QUEUE_KEYS
    # For the ETAs of those that hold GPUs.
    shows_runs = True

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        self._reader = QueueReader(app.runs_dir)
        self._described: QueueRow | None = None
        """The run that the footer and the reason are about. Keys change the one under the cursor."""
        self.queue_poller = self.follow(Watched("queue", self._reader.read, interval_s=app.intervals.poll_s))

    def compose_body(self) -> ComposeResult:
        with Container(id="queue-panels"):
            yield Lines(selectable=True, id="queue", empty_text=Text("Loading …", MUTED))
            with Container(id="queue-side"):
                yield Lines(id="queue-gpus", title="GPUs", focusable=False)
                yield Lines(id="queue-reason", title="Waits for", focusable=False)

    def on_mount(self) -> None:
        self.query_one("#queue").focus()

    @property
    def rows(self) -> list[QueueRow]:
        return self.queue_poller.value or []

    @property
    def selected(self) -> QueueRow | None:
        key = self.query_one("#queue", Lines).selected_key
        return next((row for row in self.rows if row.key == key), None)

    def update_content(self) -> None:
        self.show_title("queue")
        if self.queue_poller.value is not None:
            snapshot, app = self.gputrain_app.gpu_poller.snapshot, self.gputrain_app
            live = (row for row in app.run_list_poller.rows or () if row.live)
            etas = {row.name: row.record.values.get("eta_seconds") for row in live}
            waits_for_cpu = any(row.gpus == CPU.uuid for row in self.rows)
            cpu_holders = self._reader.cpu_holders if waits_for_cpu else None
            devices = queue_devices(() if snapshot is None else snapshot.gpus, cpu_holders, etas)
            strip, panel = self.query_one("#queue-gpus", Lines), self.query_one("#queue", Lines)
            strip.display = bool(devices)
            runs = queued_runs(self.rows, devices, etas)
            shown = mark_kept(devices, runs)
            strip.set_texts(strip_lines(shown, strip.text_width, is_wide=self.has_class("-wide")))
            table = fit(SCREEN_COLUMNS, runs, panel.text_width)
            rows = [KeyedRow(run.row.key, styled(table.line(run))) for run in runs]
            panel.set_rows(rows, [styled(table.header(MUTED))] if rows else [], Text(NOTHING_WAITS, MUTED))
            panel.set_titles(queue_title(self.rows))
        self._show_reason()

    def _show_reason(self) -> None:
        """Show why the queue cannot be read, else all of the reason of the run under the cursor."""
        panel, row = self.query_one("#queue-reason", Lines), self.selected
        self._described = row
        problem = self.queue_poller.problem
        text = Text(printable(str(problem)), BAD) if problem else Text("" if row is None else describe_row(row))
        panel.set_texts(wrap_text(text, panel.text_width))

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self._show_reason()
        self.update_keys()

    # Commands

    def is_available(self, action: str) -> bool:
        row, name = self._described, action.partition("(")[0]
        is_own = row is not None and row.is_own and bool(row.folder)
        if name in ("hold", "shift"):
            return is_own and row is not None and row.is_live
        if name in ("stop", "open"):
            return is_own
        if name == "resume":
            return any(each.state is RowState.INTERRUPTED for each in self.rows)
        return True

    def title_of(self, key: Key) -> str:
        if key.action == "hold" and (row := self._described) is not None and row.state is RowState.HELD:
            return "release"
        return "cancel" if key.action == "stop" else super().title_of(key)

    def action_open(self) -> None:
        if (row := self._own_row("open")) is not None:
            self.gputrain_app.open_run(row.folder)

    def action_hold(self) -> None:
        from engine.jobs.queue import edit

        if (row := self._own_row("change")) is not None:
            self._change(partial(edit.release if row.state is RowState.HELD else edit.hold, row))

    def action_shift(self, step: Literal[-1, 1]) -> None:
        from engine.jobs.queue import edit

        if (row := self._own_row("move")) is not None:
            self._change(partial(edit.shift, row, self.rows, step))

    def action_stop(self) -> None:
        from engine.jobs.queue import edit

        row = self._own_row("cancel")
        if row is None:
            return

        def cancel() -> str:
            if not row.is_live:
                watch_other_hosts(self.gputrain_app, [RunFolder(Path(row.folder))])
            return edit.cancel(row)

        question = f"Cancel {printable(row.name)}? It leaves the queue and does not start."
        confirm(self.app, question, "Keep it in the queue", "Cancel it", partial(self._change, cancel))

    def action_resume(self) -> None:
        interrupted = [row for row in self.rows if row.state is RowState.INTERRUPTED]
        if not interrupted:
            self.gputrain_app.show_toast(Problem("", "No run was interrupted while it waited", code="not-found"))
        elif not self.gputrain_app.refuses_in_demo("runs cannot be started"):
            resume = partial(self._change, partial(resume_all, interrupted))
            if len(interrupted) == 1:
                resume()
            else:
                names = printable(list_names([row.name for row in interrupted]))
                confirm(self.app, f"Resume {names}?", "Resume none", f"Resume all {len(interrupted)}", resume)

    def _own_row(self, verb: str) -> QueueRow | None:
        """Return the selected run, if it is one of this user; else say why the key has no effect."""
        row = self.selected
        if row is None:
            self.gputrain_app.show_toast(Problem("", "Select a run first", code="not-selected"))
        elif not row.is_own or not row.folder:
            reason = f"{row.name} belongs to {row.user}; only that user can {verb} it"
            self.gputrain_app.show_toast(Problem("", reason, code="foreign-owner"))
            return None
        return row

    def _change(self, action: Callable[[], str]) -> None:
        """Change the queue in a thread: the supervisor of a run takes a second to answer."""

        def work() -> str:
            try:
                return action()
            finally:
                self._reader.forget_stored()
                self.queue_poller.request_poll()

        self.act(work, self.gputrain_app.show_toast, in_thread=True)


def resume_all(rows: Sequence[QueueRow]) -> str:
    """Start interrupted runs again. Return what became of them, as a sentence. Raises UsageError."""
    from engine.jobs.launch.detached import resume_waits
    from tui.screens.launcher import launch_run

    results = list(resume_waits(rows, launch_run))
    refused = [f"{result.row.name}: {' '.join(result.output)}" for result in results if not result.accepted]
    if refused:
        raise UsageError.one("", "; ".join(refused), code="not-started")
    return f"In the queue again: {', '.join(result.row.name for result in results)}"
