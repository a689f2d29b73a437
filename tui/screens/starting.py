"""A run on its way: what its supervisor says until the run has begun, or why it has not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.utils.text import printable
from tui.keymap import STARTING_COMMANDS, Command
from tui.launcher import LaunchedRun
from tui.screens.base import AppServices, GputrainScreen
from tui.text.palette import BAD, MUTED, WARNING
from tui.widgets.lines import Lines

POLL_INTERVAL_SECONDS = 0.2


class StartingScreen(GputrainScreen):
    """Gives way to the run's own screen as soon as that has something to show."""

    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = STARTING_COMMANDS

    def __init__(self, app: AppServices, launched: LaunchedRun) -> None:
        super().__init__(app)
        self._launched = launched

    def compose_body(self) -> ComposeResult:
        lines = Lines(id="output")
        lines.border_title = "starting"
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
        code, told = self._launched.exit_code, self._launched.output_lines()
        seconds = time.time() - self._launched.launched_at
        texts = [Text(printable(line), BAD if line.startswith("error:") else "") for line in told]
        if self._launched.warning is not None:
            texts.append(Text(self._launched.warning, WARNING))
        if code is None:
            words = f"The run is being set up, since {seconds:.0f} s. It goes on when you leave."
            texts.append(Text(words, MUTED))
        elif code == 0:
            texts.append(Text("There was nothing left to do. esc goes back.", MUTED))
        else:
            texts.append(Text("The run did not begin. esc goes back to where it was asked for.", BAD))
        lines = self.query_one(Lines)
        lines.border_title = "starting" if code is None else "over" if code == 0 else "not started"
        lines.set_texts([part for text in texts for part in text.wrap(self.app.console, max(lines.size.width, 20))])
        self.show_title("new run")

    async def action_back(self) -> None:
        if self._launched.exit_code is not None:
            # It was read here.
            self.gputrain_app.pending_run = None
        await super().action_back()

    def action_stop(self) -> None:
        if self._launched.exit_code is None:
            self._launched.process.terminate()
            self.gputrain_app.show_toast("asked to stop")
