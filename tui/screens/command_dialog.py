"""The dialog that asks for a command to run: a line of a shell, and the options of `gputrain run`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from tui.form.command_lines import CommandLine, config_values, earlier_lines, line_of_run
from tui.screens.base import AppServices, Dialog
from tui.screens.dialogs import ask_to_share_gpus
from tui.screens.form_rows import picked_gpus
from tui.widgets.entry import TextEntry


class CommandDialog(Dialog[list[str]]):
    """Type a command. Returns the arguments of `gputrain` that run it, or None if canceled.

    The arrow keys show the `earlier` lines, the oldest of which is first.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "recall(-1)", show=False),
        Binding("down", "recall(1)", show=False),
    ]
    HINT = "enter start   tab options   ↑ ↓ earlier commands   esc cancel"
    BOX_CLASSES = "dialog wide"

    def __init__(self, line: CommandLine, earlier: Sequence[CommandLine] = ()) -> None:
        super().__init__("Run a command")
        self._lines, self._position = [*earlier, line], len(earlier)

    def compose_box(self) -> ComposeResult:
        line = self._lines[-1]
        yield Static("Command, in this working folder", classes="label", markup=False)
        yield TextEntry(line.words, id="words", placeholder="python train.py --lr 0.1")
        yield Static("Options of gputrain run", classes="label", markup=False)
        yield TextEntry(line.options, id="options", placeholder="--gpus free:2 --queue --name fit --time-limit 60")
        yield Static("", classes="problem", markup=False)

    @property
    def _line(self) -> CommandLine:
        return CommandLine(self.query_one("#words", TextEntry).value, self.query_one("#options", TextEntry).value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self.dismiss(self._line.arguments())
        except UsageError as error:
            self.query_one(".problem", Static).update(str(error))

    def action_recall(self, steps: int) -> None:
        """Show an earlier or a later line. What is typed stays below all of them."""
        if self._position == len(self._lines) - 1:
            self._lines[-1] = self._line
        self._position = min(max(self._position + steps, 0), len(self._lines) - 1)
        line = self._lines[self._position]
        for name, text in (("#words", line.words), ("#options", line.options)):
            entry = self.query_one(name, TextEntry)
            entry.value, entry.cursor_position = text, len(text)


def ask_command(app: App[None], services: AppServices, run: RunFolder | None = None) -> None:
    """Ask for a command and start it; of the run of a command, that one. Raises UsageError if it cannot be read."""

    def start(arguments: list[str] | None) -> None:
        if arguments is not None:
            launch = partial(services.launch, arguments, title="new command")
            ask_to_share_gpus(app, services, config_values(arguments), launch)

    if run is not None:
        line = line_of_run(run)
    else:
        picked = picked_gpus(services.gpu_poller.snapshot, services.picked_gpu_uuids)
        line = CommandLine(options=f"--gpus {picked}" if picked else "")
    app.push_screen(CommandDialog(line, earlier_lines(services.run_list_poller.rows or ())), start)
