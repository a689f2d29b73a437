"""The keys of screens with a list of runs: they change the run under the cursor, or the selected ones.

`tui.screens.run_changes` changes runs. It is imported with the first change: the monitor is drawn without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.base.errors import Problem
from engine.runs.folder import RunFolder, RunState
from engine.runs.run_row import RunRow
from tui.screens.base import GputrainScreen
from tui.screens.keymap import Ability, Key

if TYPE_CHECKING:
    from tui.screens.run_changes import RunChanges

CHANGES = ("stop", "pause", "resume", "again", "log", "archive", "delete")
"""Actions on the run under the cursor of a list."""


class RunKeysScreen(GputrainScreen):
    """Base class of screens with a list of runs: keys that change the run under the cursor, or the selected ones."""

    @cached_property
    def _changes(self) -> RunChanges:
        from tui.screens.run_changes import RunChanges

        return RunChanges(self.gputrain_app, self)

    def selected_run(self) -> RunRow | None:
        """Return the run or the sweep under the cursor."""
        raise NotImplementedError

    def target_runs(self) -> list[RunRow]:
        """Return the selected runs, else the one under the cursor."""
        row = self.selected_run()
        return [] if row is None else [row]

    def can_change(self, action: str) -> bool:
        """Whether a key that changes a run has an effect on the one under the cursor."""
        row = self.selected_run()
        if row is None or row.trials or Ability.CHANGE not in self.abilities:
            return row is not None and action in ("archive", "delete")
        if action == "pause":
            return row.live and row.state != RunState.WAITING and not row.record.command
        if action in ("stop", "resume"):
            return row.live is (action == "stop") and row.state != RunState.FINISHED
        return True

    def title_of(self, key: Key) -> str:
        row = self.selected_run()
        if key.action == "pause" and row is not None and row.state == RunState.PAUSED:
            return "continue"
        if key.action == "archive" and all(row.archived for row in self.target_runs()):
            return "unarchive"
        return super().title_of(key)

    def act_on_run(self, action: str, act: Callable[[RunRow], object]) -> None:
        """Do something with the run under the cursor; a toast says why not."""
        row = self.selected_run()
        if row is None or Ability.CHANGE not in self.abilities:
            self.gputrain_app.show_toast(Problem("", "Select a run of gputrain first", code="not-selected"))
        elif (row.trials or (action == "pause" and row.record.command)) and not self.can_change(action):
            reason = f"{row.name} is a {'sweep' if row.trials else 'command'}, for which this key has no effect"
            self.gputrain_app.show_toast(Problem("", reason, code="not-supported"))
        else:
            act(row)

    def action_stop(self) -> None:
        self.act_on_run("stop", lambda row: self._changes.stop(*_folder_and_state(row)))

    def action_pause(self) -> None:
        self.act_on_run("pause", lambda row: self._changes.pause(*_folder_and_state(row)))

    def action_resume(self) -> None:
        self.act_on_run("resume", lambda row: self.gputrain_app.resume_run(*_folder_and_state(row)))

    def action_again(self) -> None:
        self.act_on_run("again", lambda row: self._changes.again(RunFolder(Path(row.folder))))

    def action_log(self) -> None:
        self.act_on_run("log", self._show_log)

    def _show_log(self, row: RunRow) -> None:
        from tui.screens.dialogs import LogDialog
        from tui.screens.pollers.run import watch_log

        log = watch_log(RunFolder(Path(row.folder)).log)
        log.start()
        self.app.push_screen(LogDialog(row.name, lambda: log.value or ()), lambda _: log.close())

    def action_delete(self) -> None:
        self.act_on_run("delete", lambda _: self._changes.delete(self.target_runs()))

    def action_archive(self) -> None:
        self.act_on_run("archive", lambda _: self._changes.archive(self.target_runs()))


def _folder_and_state(row: RunRow) -> tuple[RunFolder, RunState]:
    return RunFolder(Path(row.folder)), RunState(row.state)
