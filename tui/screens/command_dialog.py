"""The dialog that asks for a command to run: a line of a shell, and the options of `gputrain run`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from textual.app import ComposeResult
from textual.widgets import Input, Static

from engine.base.errors import UsageError
from engine.config.schema import UNSTORED_KEYS
from engine.jobs.command.environment import run_options
from engine.jobs.command.spec import foreign_command_reason, read_command
from engine.runs.folder import RunFolder
from engine.runs.run_config import read_changed_config
from tui.form.flags import FLAG_TO_KEY
from tui.screens.base import Dialog
from tui.screens.dialogs import ask_to_share_gpus
from tui.screens.form_rows import picked_gpus
from tui.screens.services import AppServices
from tui.screens.widgets.entry import TextEntry

KEY_OF_OPTION = {f"--{flag.replace('_', '-')}": key for flag, key in FLAG_TO_KEY.items()}


@dataclass(frozen=True)
class CommandLine:
    """The options of `gputrain run` and the words of the command, as a person types them."""

    words: str = ""
    options: str = ""

    def arguments(self) -> list[str]:
        """Return the arguments of `gputrain` that run the command in the background. Raises UsageError."""
        words = _split(self.words, "Command")
        if not words:
            raise UsageError.one("Command", "is empty; type it as in a shell", code="missing-value")
        before = ["run", "--headless", *_split(self.options, "Options")]
        return [*before, "--", *words]


def config_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the config values that the options of `gputrain run` set, by key. That of a switch is any text."""
    options = list(takewhile(lambda word: word != "--", arguments))
    found = {}
    for word, following in pairwise([*options, ""]):
        name, separator, value = word.partition("=")
        if (key := KEY_OF_OPTION.get(name, name)) != name or separator:
            found[key] = value if separator else following
    return found


def _split(text: str, label: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError.one(label, f"cannot be split into words: {error}", code="invalid-value") from error


def line_of_run(folder: RunFolder) -> CommandLine:
    """Return the line that starts the command of a run again, as a new run. Raises UsageError unless this user wrote
    it."""
    if (reason := folder.foreign_reason() or foreign_command_reason(folder)) is not None:
        raise UsageError.one(folder.name, f"is not started again, because it {reason}", code="untrusted-code")
    command = read_command(folder)
    options = _config_options(read_changed_config(folder.config) or {})
    options += [] if command.cwd == str(Path.cwd()) else ["--cwd", command.cwd]
    options += run_options(command)
    return CommandLine(shlex.join(command.argv), shlex.join(options))


def _config_options(config: Mapping[str, Any]) -> list[str]:
    options: list[str] = []
    for flag, key in FLAG_TO_KEY.items():
        value = config.get(key)
        is_of_run = key.startswith("run.") and key != "run.snapshot"
        if value is None or is_of_run or key in UNSTORED_KEYS:
            continue
        options += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options


class CommandDialog(Dialog[CommandLine]):
    """Type a command. Returns a line that can be split into arguments, or None if canceled."""

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
        line = CommandLine(words, options)
        try:
            line.arguments()
        except UsageError as error:
            self.query_one(".problem", Static).update(str(error))
        else:
            self.dismiss(line)


def ask_command(app: AppServices, run: RunFolder | None = None) -> None:
    """Ask for a command and start it; of the run of a command, that one. Raises UsageError if it cannot be read.

    The line before is there to be changed: a command that could not be started is corrected.
    """

    def start(line: CommandLine | None) -> None:
        if line is not None:
            app.typed_command, arguments = line, line.arguments()

            def launch() -> None:
                if app.launch(arguments):
                    app.picked_gpu_uuids.clear()

            ask_to_share_gpus(app, config_values(arguments), launch)

    if run is not None:
        line = line_of_run(run)
    else:
        picked = picked_gpus(app.gpu_poller.snapshot, app.picked_gpu_uuids)
        options, typed = f"--gpus {picked}" if picked else "", app.typed_command
        line = CommandLine(options=options) if typed is None or options not in typed.options else typed
    app.push_screen(CommandDialog(line), start)
