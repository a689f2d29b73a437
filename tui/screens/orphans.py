"""The screen of the orphans: processes of this user whose supervisor or torchrun is dead, and a key that ends them.

`engine.command.orphans` finds them, `engine.command.stop` ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.command.orphans import TORCHRUN, OrphanFinder, Orphans, leftover_finder
from engine.command.stop import describe_unkillable, end_processes
from engine.foreign.process import ProcessTree
from engine.utils.errors import Problem, UsageError
from engine.utils.process_table import ProcessId, read_stat
from engine.utils.text import list_names, printable
from tui.keymap import ORPHANS_COMMANDS, Command
from tui.palette import BAD, MUTED, WARNING
from tui.pollers.watched import Watched
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import ChoiceDialog
from tui.tables.process import tree_lines
from tui.widgets.lines import Lines, Row
from tui.widgets.text_line import TextLine

NOTHING_LEFT = "No process of yours is left behind by a dead supervisor or torchrun."


class OrphansScreen(GputrainScreen):
    """Lists the orphans in one group for each run or torchrun that has left them behind."""

    CSS_PATH = "orphans.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = ORPHANS_COMMANDS

    def __init__(self, app: AppServices) -> None:
        super().__init__(app)
        finder = OrphanFinder()
        self.orphans_poller = self.follow(Watched("orphans", finder.list, interval_s=app.intervals.poll_s))

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="orphans-status")
        yield Lines(selectable=True, id="orphans", empty_text=Text("Loading …", MUTED))

    def on_mount(self) -> None:
        self.query_one("#orphans").focus()

    @property
    def groups(self) -> list[Orphans]:
        return self.orphans_poller.value or []

    @property
    def selected(self) -> Orphans | None:
        """The group under the cursor."""
        key = self.query_one("#orphans", Lines).selected_key or ""
        return next((group for group in self.groups if _key(group) == key.partition("/")[0]), None)

    def update_content(self) -> None:
        self.show_title("orphans")
        problem, groups = self.orphans_poller.problem or self.orphans_poller.unexpected_error, self.groups
        count = sum(len(group.processes) for group in groups)
        status, style = (f" {_number(count)} left behind" if groups else ""), WARNING
        if problem is not None:
            status, style = f" {printable(str(problem))}", BAD
        self.show_line("#orphans-status", Text(status, style, no_wrap=True, end=""))
        if self.orphans_poller.value is None:
            return
        panel = self.query_one("#orphans", Lines)
        snapshot = self.gputrain_app.gpu_poller.snapshot
        pids = {process.id.pid for group in groups for process in group.processes}
        uses = [
            (gpu, process)
            for gpu in (snapshot.gpus if snapshot is not None else ())
            for process in gpu.processes.value or ()
            if process.pid in pids
        ]
        tree = ProcessTree(tuple(process for group in groups for process in group.processes))
        head, *lines = tree_lines(tree, None, uses, panel.text_width)
        rows: list[Row] = []
        for group in groups:
            shown, lines = lines[: len(group.processes)], lines[len(group.processes) :]
            rows.append(Row(_key(group), Text(_title(group), WARNING, no_wrap=True, end="")))
            pairs = zip(group.processes, shown, strict=True)
            rows += [Row(f"{_key(group)}/{process.id.pid}", line) for process, line in pairs]
        panel.set_rows(rows, [head] if rows else [], Text(NOTHING_LEFT, MUTED))

    def on_lines_moved(self, event: Lines.Moved) -> None:
        self.update_keys()

    def is_available(self, action: str) -> bool:
        return action != "end" or self.selected is not None

    def action_end(self) -> None:
        """End the processes of the group under the cursor, if the user agrees."""
        group = self.selected
        if group is None:
            self.gputrain_app.show_toast(Problem("", "Select a process first", code="not-selected"))
            return

        def answer(key: str | None) -> None:
            if key == "yes":
                self.act(lambda: _end(group), self._show_result, in_thread=True)

        count = _number(len(group.processes))
        pids = list_names([str(process.id.pid) for process in group.processes], limit=8)
        rows = [Row("no", Text("Leave them")), Row("yes", Text(f"End {count}"))]
        note = f"{pids}: SIGTERM, and SIGKILL after 5 s. What they have not saved is lost."
        self.app.push_screen(ChoiceDialog(f"End {count} of {printable(group.origin.label)}?", rows, note), answer)

    def _show_result(self, sentence: str) -> None:
        self.gputrain_app.show_toast(sentence)
        self.orphans_poller.request_poll()


def _number(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _key(group: Orphans) -> str:
    """Return a key that stays that of the group while its processes change."""
    return f"{hash(group.origin):x}"


def _title(group: Orphans) -> str:
    is_torchrun = group.origin.label == TORCHRUN
    what = "a torchrun that is dead" if is_torchrun else f"run {group.origin.label}, whose supervisor is dead"
    return printable(f"left by {what}: {_number(len(group.processes))}")


def _agreed(find: Callable[[], list[ProcessId]], agreed: set[ProcessId]) -> list[ProcessId]:
    """Return those orphans to whose end the user has agreed, and add what they have started since to them."""
    for process in (found := find()):
        status = read_stat(process.pid)
        if status is not None and any(status.parent == each.pid for each in agreed):
            agreed.add(process)
    return [process for process in found if process in agreed]


def _end(group: Orphans) -> str:
    """End a group, and return the result as a sentence. Raises UsageError if some cannot be killed."""
    left = end_processes(partial(_agreed, leftover_finder(group.origin), {process.id for process in group.processes}))
    if left:
        raise UsageError.one("", f"{describe_unkillable(left)}; it may still hold a GPU", code="process-left")
    return f"{_number(len(group.processes))} of {printable(group.origin.label)} ended"
