"""The dialog that asks for a command to run: a line of a shell, and the options of `gputrain run`."""

from __future__ import annotations

from functools import partial

from textual.app import App, ComposeResult
from textual.widgets import Input, Static

from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from tui.form.command_lines import CommandLine, config_values, line_of_run
from tui.screens.base import AppServices, Dialog
from tui.screens.dialogs import ask_to_share_gpus
from tui.screens.form_rows import picked_gpus
from tui.widgets.entry import TextEntry


class CommandDialog(Dialog[list[str]]):
    """Type a command. Returns the arguments of `gputrain` that run it, or None if canceled."""

    HINT = "enter start   tab options   esc cancel"
    BOX_CLASSES = "dialog wide"

    def __init__(self, line: CommandLine) -> None:
        super().__init__("Run a command")
        self._line = line

    def compose_box(self) -> ComposeResult:
        line = self._line
        yield Static("Command, in this working folder", classes="label", markup=False)
        yield TextEntry(line.words, id="words", placeholder="python train.py --lr 0.1")
        yield Static("Options of gputrain run", classes="label", markup=False)
        yield TextEntry(line.options, id="options", placeholder="--gpus free:2 --queue --name fit --time-limit 60")
        yield Static("", classes="problem", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        words, options = (self.query_one(name, TextEntry).value for name in ("#words", "#options"))
        try:
            self.dismiss(CommandLine(words, options).arguments())
        except UsageError as error:
            self.query_one(".problem", Static).update(str(error))


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
    app.push_screen(CommandDialog(line), start)
