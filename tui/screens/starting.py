"""The screen of a run that is starting: its supervisor's output until the run folder exists, or why it failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.utils.text import printable
from tui.keymap import STARTING_COMMANDS, Command
from tui.launcher import LaunchedRun
from tui.palette import BAD, MUTED, WARNING
from tui.screens.base import AppServices, GputrainScreen
from tui.widgets.lines import Lines

POLL_INTERVAL_SECONDS = 0.2


class StartingScreen(GputrainScreen):
    """Shows the output of a launched run, and switches to the run screen once its run folder is found."""

    CSS_PATH = "starting.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = STARTING_COMMANDS

    def __init__(self, app: AppServices, launched: LaunchedRun) -> None:
        super().__init__(app)
        self._launched = launched

    def compose_body(self) -> ComposeResult:
        lines = Lines(id="output")
        lines.border_title = "Starting"
        yield lines

    def on_mount(self) -> None:
        self.set_interval(POLL_INTERVAL_SECONDS, self._poll_launch)

    def _poll_launch(self) -> None:
        if not self.is_on_top:
            return
        folder = self._launched.find_folder()
        if folder is not None:
            if self._launched.warning is not None:
                self.gputrain_app.show_toast(self._launched.warning, warning=True, timeout_s=15)
            self.gputrain_app.switch_to_run(folder)
            return
        self.update_content()

    def update_content(self) -> None:
        code, output = self._launched.exit_code, self._launched.output_lines()
        seconds = time.time() - self._launched.launched_at
        texts = [Text(printable(line), BAD if line.startswith("error:") else "") for line in output]
        if self._launched.warning is not None:
            texts.append(Text(self._launched.warning, WARNING))
        if code is None:
            progress = f"The run is being set up ({seconds:.0f} s). It continues when you leave this screen."
            texts.append(Text(progress, MUTED))
        elif code == 0:
            texts.append(Text("The run had nothing left to do. Press esc to go back.", MUTED))
        else:
            texts.append(Text("The run did not start. Press esc to go back.", BAD))
        lines = self.query_one(Lines)
        lines.border_title = "Starting" if code is None else "Done" if code == 0 else "Not started"
        lines.set_texts([part for text in texts for part in text.wrap(self.app.console, max(lines.text_width, 20))])
        self.show_title("new run")

    async def action_back(self) -> None:
        if self._launched.exit_code is not None:
            # Its output was shown here, so the command line need not print it on exit.
            self.gputrain_app.pending_run = None
        await super().action_back()

    def action_stop(self) -> None:
        if self._launched.exit_code is None:
            self._launched.process.terminate()
            self.gputrain_app.show_toast("Sent the stop request to the run")
