"""Dialogs of the form: its errors, choose GPUs, and open a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.app import App

from engine.gpus.snapshot import Snapshot
from engine.utils.errors import Problem
from engine.utils.files import expand_user
from engine.utils.text import pluralize, printable
from tui.form.model import Form
from tui.screens.dialogs import MultiChoiceDialog, TextDialog, TextInputDialog, problem_lines
from tui.screens.form_rows import gpu_choices

CONFIG_NOTE = "The path of a YAML file, whose values the form starts from. What you have changed stays."
NEEDS_VALID_CONFIG = Problem("", "Fix the errors first; the command needs a valid config", code="invalid-value")
DRAFT_NOTE = "These are the values of your last form. ^r starts a new one."


def problems_dialog(problems: Sequence[Problem]) -> TextDialog:
    """Return the dialog that says why a run is not started."""
    lines = problem_lines([(problem.label, printable(problem.message)) for problem in problems])
    return TextDialog(f"Not started: {pluralize(len(problems), 'error')} to fix", lines)


def ask_gpus(app: App[None], snapshot: Snapshot, value: str, use: Callable[[str], None]) -> None:
    """Choose the GPUs to train on; `value` is the current one of `device.gpus`. Pass another one to `use`."""
    rows, selected = gpu_choices(snapshot, value)

    def answer(picked: list[str] | None) -> None:
        # A value such as `auto` selects no row, and stays as it is unless the selection is changed.
        if picked is not None and picked != selected:
            use(",".join(picked) or "cpu")

    app.push_screen(MultiChoiceDialog("GPUs to train on", rows, selected), answer)


def ask_config_file(app: App[None], use: Callable[[str], None]) -> None:
    """Pass the absolute path of a config file that can be read to `use`."""

    def path_of(text: str) -> str:
        # The form may be continued in another folder.
        return str(expand_user(text).absolute())

    def check(text: str) -> None:
        _ = Form(path_of(text)).base_config

    def answer(text: str | None) -> None:
        if text is not None:
            use(path_of(text))

    app.push_screen(TextInputDialog("Open a config file", "", CONFIG_NOTE, check), answer)
