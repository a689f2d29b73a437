"""Changes of runs that the list asks for: tags, note, archive. Files are written in a thread.

`engine.runs.labels` writes them. The list shows the change when its poller has read the run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from textual.screen import Screen

from engine.runs.folder import RunFolder
from engine.runs.labels import MAX_NOTE_CHARACTERS, RunLabels, change_labels, check_labels
from engine.runs.run_row import RunRow
from engine.utils.errors import UsageError
from engine.utils.text import pluralize, printable
from tui.screens.base import AppServices
from tui.screens.dialogs import TextInputDialog

TAGS_NOTE = "Separated by blanks; letters, digits and . _ - / : are allowed."


class RunChanges:
    """Asks for a change of one run or of several, and makes it."""

    def __init__(self, app: AppServices, screen: Screen[None]) -> None:
        self._app, self._screen = app, screen

    def _in_thread(self, rows: Sequence[RunRow], change: Callable[[RunRow], object], done: str) -> None:
        """Change each of the runs in a thread, then report `done`, or how many could not be changed and why."""

        def work() -> None:
            problems = []
            for row in rows:
                try:
                    change(row)
                except UsageError as error:
                    problems.append(str(error))
            self._screen.app.call_from_thread(self._report, len(rows), problems, done)

        self._screen.run_worker(work, thread=True, group="changes")

    def _report(self, count: int, problems: Sequence[str], done: str) -> None:
        if not problems:
            self._app.show_toast(done)
        else:
            failed = f"{len(problems)} of {pluralize(count, 'run')} failed: " if count > 1 else ""
            self._app.show_toast(failed + problems[0], warning=True, timeout_s=10)
        self._app.run_list_poller.request_poll()

    def _change_labels(self, rows: Sequence[RunRow], change: Callable[[RunLabels], RunLabels], done: str) -> None:
        if self._app.demo_notice:
            self._app.show_toast("Demo mode: runs cannot be changed", warning=True)
            return
        self._in_thread(rows, lambda row: change_labels(RunFolder(Path(row.folder)), change), done)

    def tags(self, rows: Sequence[RunRow]) -> None:
        """Ask for the tags that all of the runs have: tags that are added or removed change in each of them."""
        if not rows:
            return
        common = [tag for tag in rows[0].tags if all(tag in row.tags for row in rows)]

        def problem_of(text: str) -> str | None:
            return labels_problem(RunLabels(tags=tuple(dict.fromkeys(text.split()))))

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
        self._ask(TextInputDialog(title, " ".join(common), about, problem_of, may_be_empty=True), answer)

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
            f"Note of {printable(row.name)}", row.note, about, lambda text: labels_problem(RunLabels(note=text)),
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

    def _ask(self, dialog: TextInputDialog, answer: Callable[[str | None], None]) -> None:
        self._screen.app.push_screen(dialog, answer)


def labels_problem(labels: RunLabels) -> str | None:
    """Return why labels cannot be stored, None if they can."""
    try:
        check_labels(labels)
    except UsageError as error:
        return str(error)
    return None


def names(rows: Sequence[RunRow]) -> str:
    """Return the name of one run, or the number of several."""
    return printable(rows[0].name) if len(rows) == 1 else pluralize(len(rows), "run")
