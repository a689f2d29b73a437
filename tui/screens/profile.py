"""The screen of a profile: where the time of training steps goes, on every rank of a run.

`tui.profile_poller` reads stored profiles and waits for new ones, `tui.text.profile` makes the lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.runs.control import DEFAULT_PROFILE_STEPS, send_request
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem, UsageError
from engine.utils.files import shown_path
from engine.utils.text import format_duration, pluralize, printable
from tui.keymap import PROFILE_COMMANDS, Command
from tui.palette import BAD, MUTED, STRONG, WARNING
from tui.profile_poller import ProfilePoller, StoredProfile
from tui.screens.base import AppServices, GputrainScreen
from tui.text.profile import profile_lines, trace_lines
from tui.widgets.lines import Lines
from tui.widgets.text_line import TextLine


class ProfileScreen(GputrainScreen):
    """Shows the stored profiles of a run, and asks a live run for another one."""

    CSS_PATH = "profile.tcss"
    SCREEN_COMMANDS: ClassVar[Sequence[Command]] = PROFILE_COMMANDS

    def __init__(self, app: AppServices, folder: RunFolder, *, asks: bool) -> None:
        """`asks` requests a profile at once."""
        super().__init__(app)
        self.folder = folder
        self._asks = asks
        self._drawn: object = None
        self.poller = ProfilePoller(folder)

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="profile-status")
        yield Lines(id="profile", empty_text=Text(""))

    def on_mount(self) -> None:
        self.query_one("#profile").focus()
        if self._asks:
            self.action_profile()
        self.poller.on_first_result = self._show_first_result
        self.poller.start()

    def _show_first_result(self) -> None:
        """Update the screen without waiting for its refresh interval. Called in the thread of the poller."""
        self.call_later(self.update_if_on_top)

    def on_unmount(self) -> None:
        self.poller.close()

    @property
    def has_content(self) -> bool:
        return self.poller.has_polled

    def update_content(self) -> None:
        self.show_title(f"{printable(self.folder.name)}   profile")
        stored = self.poller.latest
        self.show_line("#profile-status", self._status_line(stored))
        lines = self.query_one("#profile", Lines)
        drawn = (stored, lines.text_width)
        if lines.text_width > 0 and drawn != self._drawn:
            self._drawn = drawn
            lines.set_texts(self._content(stored, lines.text_width))

    def _content(self, stored: StoredProfile | None, width: int) -> list[Text]:
        if stored is None or stored.profile is None:
            return []
        path = str(shown_path(self.folder.profiles / stored.name))
        return [*profile_lines(stored.profile, width), *trace_lines(stored.profile, path)]

    def _status_line(self, stored: StoredProfile | None) -> Text:
        """Return which profile is shown, or what the screen waits for."""
        poller = self.poller
        line = Text(" ", no_wrap=True, overflow="ellipsis", end="")
        if (asked_at := poller.asked_at) is not None:
            seconds = format_duration(time.monotonic() - asked_at)
            line.append(f"Waiting for {pluralize(DEFAULT_PROFILE_STEPS, 'profiled step')}, {seconds}", STRONG)
            return line.append("; a pause or a validation delays them", MUTED)
        if poller.unexpected_error is not None:
            return line.append(printable(str(poller.unexpected_error)), BAD)
        if poller.answer:
            line.append(f"{printable(str(poller.answer))}   ", WARNING)
        if stored is None:
            hint = "press P to take one" if poller.is_live else "only a live run can be profiled"
            return line.append(f"No profile yet; {hint}" if poller.has_polled else "Loading …", MUTED)
        if stored.profile is None:
            return line.append(printable(str(stored.problem)), BAD)
        line.append(f"{stored.name}", STRONG)
        line.append(time.strftime("   taken %Y-%m-%d %H:%M", time.localtime(stored.profile.time)))
        return line.append(f"   {stored.number} of {stored.count}", MUTED)

    def is_available(self, action: str) -> bool:
        name, stored = action.partition("(")[0], self.poller.latest
        if name == "profile":
            return self.poller.is_live and self.poller.asked_at is None
        if name == "select":
            return stored is not None and stored.count > 1
        if name == "copy":
            return stored is not None and stored.profile is not None
        return super().is_available(action)

    def action_profile(self) -> None:
        """Ask the run for a profile."""
        if self.poller.asked_at is not None:
            self.gputrain_app.show_toast(Problem("", "A profile is being taken", code="already-running"))
            return
        if not self.folder.is_owned():
            self.gputrain_app.show_toast(Problem("", f"{self.folder.name} is not running", code="not-running"))
            return
        self.poller.expect_profile()
        try:
            send_request(self.folder.control, "profile", steps=DEFAULT_PROFILE_STEPS)
        except UsageError as error:
            self.poller.forget_request()
            self.gputrain_app.show_toast(error)
        self.update_if_on_top()

    def action_select(self, offset: int) -> None:
        self.poller.select(offset)

    def action_copy(self) -> None:
        stored = self.poller.latest
        if stored is None:
            self.gputrain_app.show_toast(Problem("", "No profile is shown", code="not-selected"))
            return
        path = str(shown_path(self.folder.profiles / stored.name))
        try:
            self.app.copy_to_clipboard(path)
        except UnicodeEncodeError:
            self.gputrain_app.show_toast(Problem("", f"The path is not valid UTF-8: {path}", code="invalid-name"))
            return
        self.gputrain_app.show_toast(f"Copied {path}")
