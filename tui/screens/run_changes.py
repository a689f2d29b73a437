"""Changes of runs that the list asks for: tags, note, archive, and deletion. Files are changed in a thread.

`engine.runs.labels` and `engine.runs.trash` change them. The list shows the change when its
poller has read the runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from engine.runs.folder import RunFolder
from engine.runs.labels import MAX_NOTE_CHARACTERS, RunLabels, change_labels, check_labels
from engine.runs.run_row import RunRow
from engine.runs.trash import RunContents, move_to_trash, run_contents
from engine.utils.codec import replace
from engine.utils.errors import Problem, UsageError, collect_problems
from engine.utils.text import pluralize, printable
from engine.utils.units import format_bytes
from tui.screens.base import AppServices, GputrainScreen, watch_other_hosts
from tui.screens.dialogs import TextInputDialog, confirm_dialog

TAGS_NOTE = "Separated by blanks; letters, digits and . _ - / : are allowed."
# Runs that the question about a deletion names.
MAX_NAMED_RUNS = 8


class RunChanges:
    """Asks for a change of one run or of several, and makes it."""

    def __init__(self, app: AppServices, screen: GputrainScreen) -> None:
        self._app, self._screen = app, screen

    def _in_thread(
        self, rows: Sequence[RunRow], change: Callable[[RunRow], object], done: str, *, moves: bool = False
    ) -> None:
        """Change each of the runs in a thread, then report `done`, or how many could not be changed and why.

        `moves`: the change needs runs that no process of another host owns, so their heartbeats are watched."""

        def change_all() -> str:
            if moves:
                watch_other_hosts(self._app, self._screen, [RunFolder(Path(row.folder)) for row in rows])
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

    def _change_labels(self, rows: Sequence[RunRow], change: Callable[[RunLabels], RunLabels], done: str) -> None:
        if not self._is_demo():
            self._in_thread(rows, lambda row: change_labels(RunFolder(Path(row.folder)), change), done)

    def tags(self, rows: Sequence[RunRow]) -> None:
        """Ask for the tags that all of the runs have: tags that are added or removed change in each of them."""
        if not rows:
            return
        common = [tag for tag in rows[0].tags if all(tag in row.tags for row in rows)]

        def check(text: str) -> None:
            check_labels(RunLabels(tags=tuple(dict.fromkeys(text.split()))))

        def answer(text: str | None) -> None:
            if text is None:
                return
            wanted = list(dict.fromkeys(text.split()))
            added, removed = [tag for tag in wanted if tag not in common], [tag for tag in common if tag not in wanted]
            if added or removed:
                done = f"Tags of {names(rows)}: {' '.join(wanted) or 'none'}"
                self._change_labels(rows, lambda labels: labels.with_tags(added, removed), done)

        title = f"Tags of {names(rows)}"
        about = f"Tags that all of them have. {TAGS_NOTE}" if len(rows) > 1 else TAGS_NOTE
        self._ask(TextInputDialog(title, " ".join(common), about, check, may_be_empty=True), answer)

    def note(self, row: RunRow | None) -> None:
        """Ask for the note of a run."""
        if row is None:
            return

        def answer(text: str | None) -> None:
            if text is not None and text != row.note:
                done = f"Note of {row.name} {'saved' if text else 'removed'}"
                self._change_labels([row], lambda labels: replace(labels, note=text), done)

        about = f"At most {MAX_NOTE_CHARACTERS} characters. The list finds runs by the words of their notes."
        dialog = TextInputDialog(
            f"Note of {printable(row.name)}", row.note, about, lambda text: check_labels(RunLabels(note=text)),
            may_be_empty=True,
        )  # fmt: skip
        self._ask(dialog, answer)

    def archive(self, rows: Sequence[RunRow]) -> None:
        """Archive the runs; if all of them are archived, restore them."""
        if not rows:
            return
        archived = not all(row.archived for row in rows)
        done = f"Archived {names(rows)}; press H to show archived runs" if archived else f"Unarchived {names(rows)}"
        self._change_labels(rows, lambda labels: replace(labels, archived=archived), done)

    def delete(self, rows: Sequence[RunRow]) -> None:
        """Move runs that have ended to the trash, after a question that names what goes."""
        if self._is_demo():
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

        def answer(key: str | None) -> None:
            if key == "yes":
                done = f"Moved {names(rows)} to the trash; `gputrain runs restore NAME` restores a run"
                self._in_thread(rows, move, done, moves=True)

        lines = [
            f"{printable(row.name)}  {row.state}  {item}"
            for row, item in zip(rows[:MAX_NAMED_RUNS], contents, strict=False)
        ]
        if len(rows) > MAX_NAMED_RUNS:
            lines.append(f"… and {len(rows) - MAX_NAMED_RUNS} more")
        if len(rows) > 1:
            size = format_bytes(sum(item.size_bytes for item in contents))
            checkpoints = pluralize(sum(item.checkpoints for item in contents), "checkpoint")
            lines.append(f"In all: {pluralize(len(rows), 'run')}, {size}, {checkpoints}")
        question = f"Move {names(rows)} to the trash?"
        self._screen.app.push_screen(confirm_dialog(question, "\n".join(lines), "Keep", "Move to the trash"), answer)

    def _is_live(self, row: RunRow) -> bool:
        """Whether a process owns the run; a toast says that it cannot be deleted."""
        if row.live:
            reason = f"{row.name} is {row.state} and cannot be deleted; stop it first"
            self._app.show_toast(Problem("", reason, code="wrong-state"))
        return row.live

    def _is_demo(self) -> bool:
        """Whether this is the demo, whose runs stay as they are; a toast says so."""
        if self._app.demo_notice:
            self._app.show_toast(Problem("", "Demo mode: runs cannot be changed", code="not-supported"))
        return bool(self._app.demo_notice)

    def _ask(self, dialog: TextInputDialog, answer: Callable[[str | None], None]) -> None:
        self._screen.app.push_screen(dialog, answer)


def names(rows: Sequence[RunRow]) -> str:
    """Return the name of one run, or the number of several."""
    return printable(rows[0].name) if len(rows) == 1 else pluralize(len(rows), "run")
