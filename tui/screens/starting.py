"""A run on its way: what its supervisor says until the run has begun, or why it has not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.utils.text import printable
from tui.keymap import STARTING, Command
from tui.launcher import Started
from tui.screens.base import AppServices, CockpitScreen
from tui.text.palette import BAD, MUTED, WARNING
from tui.widgets.lines import Lines

LOOK_SECONDS = 0.2


class StartingScreen(CockpitScreen):
    """Gives way to the run's own screen as soon as that has something to show."""

    COMMANDS_HERE: ClassVar[Sequence[Command]] = STARTING

    def __init__(self, app: AppServices, started: Started) -> None:
        super().__init__(app)
        self._started = started

    def body(self) -> ComposeResult:
        lines = Lines(id="output")
        lines.border_title = "starting"
        yield lines

    def on_mount(self) -> None:
        self.set_interval(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if not self.on_top:
            return
        folder = self._started.folder()
        if folder is not None:
            if self._started.warning is not None:
                self.cockpit.show_toast(self._started.warning, warning=True, timeout_s=15)
            self.cockpit.switch_to_run(folder)
            return
        self.tick()

    def tick(self) -> None:
        code, told = self._started.code, self._started.lines()
        seconds = time.time() - self._started.began
        texts = [Text(printable(line), BAD if line.startswith("error:") else "") for line in told]
        if self._started.warning is not None:
            texts.append(Text(self._started.warning, WARNING))
        if code is None:
            words = f"The run is being set up, since {seconds:.0f} s. It goes on when you leave."
            texts.append(Text(words, MUTED))
        elif code == 0:
            texts.append(Text("There was nothing left to do. esc goes back.", MUTED))
        else:
            texts.append(Text("The run did not begin. esc goes back to where it was asked for.", BAD))
        lines = self.query_one(Lines)
        lines.border_title = "starting" if code is None else "over" if code == 0 else "not started"
        lines.show_texts([part for text in texts for part in text.wrap(self.app.console, max(lines.size.width, 20))])
        self.show_title("new run")

    async def action_back(self) -> None:
        if self._started.code is not None:
            # It was read here.
            self.cockpit.pending_run = None
        await super().action_back()

    def action_stop(self) -> None:
        if self._started.code is None:
            self._started.process.terminate()
            self.cockpit.show_toast("asked to stop")
