"""The screen of a run that is starting: its supervisor's output until training begins, or why it did not start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.worker import get_current_worker

from engine.command.spec import has_command
from engine.launch.detached import LaunchedRun
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem
from engine.utils.text import printable
from tui.keymap import STARTING_KEYS, Key
from tui.palette import BAD, MUTED, STRONG, WARNING
from tui.screens.base import AppServices, GputrainScreen
from tui.screens.dialogs import confirm
from tui.tables import wrap_text
from tui.widgets.lines import Lines
from tui.widgets.text_line import TextLine

POLL_INTERVAL_SECONDS = 0.2


class StartingScreen(GputrainScreen):
    """Shows the output of a launched run, and switches to the run screen when training begins."""

    CSS_PATH = "starting.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = STARTING_KEYS

    def __init__(self, app: AppServices, launched: LaunchedRun) -> None:
        super().__init__(app)
        self.launched = launched
        self._is_searching = False

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="launch-state")
        lines = Lines(id="output")
        lines.set_titles("Output")
        yield lines

    def on_mount(self) -> None:
        self.query_one("#output").focus()
        self.set_interval(POLL_INTERVAL_SECONDS, self._poll_launch)

    def _poll_launch(self) -> None:
        """Look for the run in a thread: there may be thousands of runs."""
        if not self._is_searching and self.app.screen is self:
            self._is_searching = True
            self.run_worker(self._search, thread=True)

    def _search(self) -> None:
        worker, folder = get_current_worker(), self.launched.find_folder()
        if not worker.is_cancelled:
            self.app.call_from_thread(self._show_launch, folder)

    def _show_launch(self, folder: RunFolder | None) -> None:
        self._is_searching = False
        # Below a dialog, this screen must not close itself.
        if self.app.screen is not self:
            return
        if folder is not None:
            if self.launched.warning is not None:
                self.gputrain_app.show_toast(self.launched.warning, timeout_s=15)
            self.gputrain_app.pending_runs.remove(self.launched)
            self.launched.begun()
            self.gputrain_app.switch_to_run(folder)
            return
        self.update_if_on_top()

    def update_content(self) -> None:
        code, launched = self.launched.exit_code, self.launched
        self.show_title(printable(launched.title if launched.claimed is None else launched.claimed.name))
        self.show_line("#launch-state", self._state_line(code))
        texts = [Text(printable(line), BAD if line.startswith("error:") else "") for line in launched.output_lines()]
        if launched.warning is not None:
            texts.append(Text(str(launched.warning), WARNING))
        lines = self.query_one("#output", Lines)
        lines.set_texts([part for text in texts for part in wrap_text(text, lines.text_width)])

    def _state_line(self, code: int | None) -> Text:
        if code is None:
            seconds = max(time.time() - self.launched.launched_at, 0.0)
            doing = "checking the config and the GPUs" if self.launched.claimed is None else self._doing
            note = f"{doing}, {seconds:.0f} s; the run continues when you leave this screen"
            state, style = "◌ starting", WARNING
        elif code == 0:
            state, style, note = "○ nothing left to do", STRONG, "press esc to go back"
        else:
            state, style, note = "✗ not started", BAD, "nothing was changed; press esc to go back and correct it"
        return Text.assemble(" ", (state, style), ("   " + note, MUTED), no_wrap=True, end="", overflow="ellipsis")

    @property
    def _doing(self) -> str:
        """What happens in the folder of the run before it begins."""
        folder = self.launched.claimed
        return "starting the command" if folder is not None and has_command(folder) else "loading torch"

    def is_available(self, action: str) -> bool:
        return action != "stop" or self.launched.exit_code is None

    async def action_back(self) -> None:
        if self.launched.exit_code is not None:
            # Its output was shown here, so the command line need not print it on exit.
            self.gputrain_app.pending_runs.remove(self.launched)
        await super().action_back()

    def action_stop(self) -> None:
        if self.launched.exit_code is not None:
            self.gputrain_app.show_toast(Problem("", "The run is not starting any more", code="wrong-state"))
            return

        def stop() -> None:
            self.launched.process.terminate()
            self.gputrain_app.show_toast("Sent the stop request to the run")

        question = f"Stop {printable(self.launched.title)} before its first step?"
        confirm(self.app, question, "Keep it running", "Stop", stop)
