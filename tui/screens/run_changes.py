"""What lists of runs and the screen of a run change: requests to the owner of a run, archive and deletion.

`engine.runs.control` sends requests; `engine.runs.labels` and `engine.runs.manage` change files, in a thread. The list
shows the change when its poller has read the runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from engine.base.codec import replace
from engine.base.errors import Problem, UsageError, collect_problems
from engine.base.files import is_file
from engine.base.text import pluralize, printable
from engine.base.units import format_bytes
from engine.jobs.command.spec import has_command
from engine.runs.batch.job import cancel_job
from engine.runs.control import RequestName, send_request
from engine.runs.folder import RunFolder, RunState
from engine.runs.labels import change_labels
from engine.runs.manage import RunContents, move_to_trash, run_contents
from engine.runs.run_row import RunRow
from tui.screens.base import GputrainScreen, watch_other_hosts
from tui.screens.command_dialog import ask_command
from tui.screens.dialogs import confirm
from tui.screens.services import AppServices

# Runs that the question about several names.
MAX_NAMED_RUNS = 8
STOP_QUESTIONS = {
    RunState.RUNNING: "Stop {}? It saves a checkpoint and can be resumed.",
    RunState.PAUSED: "Stop {}? It saves a checkpoint and can be resumed.",
    RunState.STARTING: "Stop {} before its first step?",
    RunState.WAITING: "Cancel {}? It leaves the queue and does not start.",
}
COMMAND_STOP_QUESTIONS = {
    RunState.RUNNING: "Stop the command of {}, and all that it started?",
    RunState.STARTING: "Stop {} before its command starts?",
    RunState.WAITING: "Cancel {}? It leaves the queue and does not start.",
    RunState.STOPPING: "Kill the command of {}, and all that it started, at once?",
}


class RunChanges:
    """Asks for a change of one run or of several, and makes it."""

    def __init__(self, app: AppServices, screen: GputrainScreen) -> None:
        self._app, self._screen = app, screen

    def request(self, folder: RunFolder, state: RunState | None, request: RequestName) -> None:
        """Send a request to the owner of a run; a toast says why not. The state is None before the first poll."""
        if state is None:
            self._app.show_toast(Problem("", f"{folder.name} is still loading", code="not-loaded"))
            return
        if not state.live:
            reason = f"{folder.name} is not running: it is {state}"
            self._app.show_toast(Problem("", reason, code="not-running"))
            return

        def done(_: object) -> None:
            # Toasts of earlier requests would cover the charts.
            self._app.clear_notifications()
            self._app.show_toast(f"Sent the {request} request to {folder.name}; its log shows the effect")

        def send() -> None:
            if request != "stop" or cancel_job(folder) is None:
                send_request(folder.control, request)

        # A batch system may not answer for a while.
        self._screen.act(send, done, in_thread=is_file(folder.job))

    def stop(self, folder: RunFolder, state: RunState | None) -> None:
        """Stop a run, after a question that says what that means in its state."""
        questions = COMMAND_STOP_QUESTIONS if has_command(folder) else STOP_QUESTIONS
        send = partial(self.request, folder, state, "stop")
        if state is None or state not in questions:
            send()
        else:
            confirm(self._app, questions[state].format(printable(folder.name)), "Keep it running", "Stop", send)

    def pause(self, folder: RunFolder, state: RunState | None) -> None:
        """Pause a run, or continue a paused one."""
        self.request(folder, state, "continue" if state is RunState.PAUSED else "pause")

    def again(self, folder: RunFolder) -> None:
        """Configure a new run with the command or the config of this one."""
        if has_command(folder):
            self._screen.act(lambda: ask_command(self._app, folder))
        else:
            self._app.open_form(folder.config)

    def _in_thread(
        self, rows: Sequence[RunRow], change: Callable[[RunRow], object], done: str, *, moves: bool = False
    ) -> None:
        """Change each of the runs in a thread, then report `done`, or how many could not be changed and why.

        `moves`: the change needs runs that no process of another host owns, so their heartbeats are watched."""

        def change_all() -> str:
            if moves:
                watch_other_hosts(self._app, [RunFolder(Path(row.folder)) for row in rows])
            problems: dict[str, list[Problem]] = {row.folder: [] for row in rows}
            for row in rows:
                with collect_problems(problems[row.folder]):
                    change(row)
            self._app.run_list_poller.request_poll()
            if failed := [found[0] for found in problems.values() if found]:
                count = f"{len(failed)} of {pluralize(len(rows), 'run')} failed: " if len(rows) > 1 else ""
                raise UsageError.one("", f"{count}{failed[0]}", code=failed[0].code)
            return done

        self._screen.act(change_all, self._app.show_toast, in_thread=True)

    def archive(self, rows: Sequence[RunRow]) -> None:
        """Archive the runs; if all of them are archived, restore them."""
        if not rows or self._app.refuses_in_demo("runs cannot be changed"):
            return
        archived = not all(row.archived for row in rows)
        done = (
            f"Archived {names(rows)}; undo with H and A in the list of runs"
            if archived
            else f"Unarchived {names(rows)}"
        )

        def change(row: RunRow) -> None:
            change_labels(RunFolder(Path(row.folder)), lambda labels: replace(labels, archived=archived))

        archive = partial(self._in_thread, rows, change, done)
        if archived and (len(rows) > 1 or rows[0].live):
            about = "\n".join(_named(f"{printable(row.name)}  {row.state}" for row in rows))
            confirm(self._app, f"Archive {names(rows)}?", "Keep", "Archive", archive, about)
        else:
            archive()

    def delete(self, rows: Sequence[RunRow]) -> None:
        """Move runs that have ended to the trash, after a question that names what goes."""
        if self._app.refuses_in_demo("runs cannot be changed"):
            return
        ended = [row for row in rows if not self._is_live(row)]
        if not ended:
            return

        def count() -> list[RunContents]:
            return [run_contents(Path(row.folder)) for row in ended]

        self._screen.act(count, partial(self._ask_to_delete, ended), in_thread=True)

    def _ask_to_delete(self, rows: Sequence[RunRow], contents: Sequence[RunContents]) -> None:
        marked = self._app.marked_runs

        def move(row: RunRow) -> None:
            move_to_trash(RunFolder(Path(row.folder)))
            marked.pop(row.folder, None)

        done = f"Moved {names(rows)} to the trash; `gputrain runs restore NAME` restores a run"
        move_all = partial(self._in_thread, rows, move, done, moves=True)
        lines = _named(f"{printable(row.name)}  {row.state}  {item}" for row, item in zip(rows, contents, strict=True))
        if len(rows) > 1:
            size = format_bytes(sum(item.size_bytes for item in contents))
            checkpoints = pluralize(sum(item.checkpoints for item in contents), "checkpoint")
            lines.append(f"In all: {pluralize(len(rows), 'run')}, {size}, {checkpoints}")
        question = f"Move {names(rows)} to the trash?"
        confirm(self._app, question, "Keep", "Move to the trash", move_all, "\n".join(lines))

    def _is_live(self, row: RunRow) -> bool:
        """Whether a process owns the run; a toast says that it cannot be deleted."""
        if row.live:
            reason = f"{row.name} is {row.state} and cannot be deleted; stop it first"
            self._app.show_toast(Problem("", reason, code="wrong-state"))
        return row.live


def _named(lines: Iterable[str]) -> list[str]:
    """Return the first lines of several runs, and how many more there are."""
    every = list(lines)
    more = len(every) - MAX_NAMED_RUNS
    return [*every[:MAX_NAMED_RUNS], *([f"… and {more} more"] if more > 0 else [])]


def names(rows: Sequence[RunRow]) -> str:
    """Return the name of one run, or the number of several."""
    return printable(rows[0].name) if len(rows) == 1 else pluralize(len(rows), "run")
