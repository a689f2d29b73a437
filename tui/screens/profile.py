"""The screen of a profile: where the time of training steps goes, on every rank of a run.

`tui.screens.pollers.files` reads stored profiles and waits for new ones, `tui.screens.tables.profile` makes the lines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult

from engine.base.errors import Problem
from engine.base.text import pluralize, printable
from engine.base.units import format_duration
from engine.runs.control import DEFAULT_PROFILE_STEPS, send_request
from engine.runs.folder import RunFolder
from engine.runs.profile_file import Profile
from tui.screens.base import GputrainScreen
from tui.screens.dialogs import confirm
from tui.screens.keymap import PROFILE_KEYS, Key
from tui.screens.pollers.files import ProfileReader, watch_profile
from tui.screens.services import AppServices
from tui.screens.tables import wrap_text
from tui.screens.tables.profile import profile_lines, trace_lines
from tui.screens.widgets.lines import Lines
from tui.screens.widgets.text_line import TextLine
from tui.terminal.palette import BAD, MUTED, STRONG, WARNING


class ProfileScreen(GputrainScreen):
    """Shows the newest profile of a run, and asks a live run for another one."""

    CSS_PATH = "profile.tcss"
    SCREEN_KEYS: ClassVar[Sequence[Key]] = PROFILE_KEYS

    def __init__(self, app: AppServices, folder: RunFolder, *, asks: bool) -> None:
        """`asks` requests a profile at once, if the run has none yet."""
        super().__init__(app)
        self.folder = folder
        self._asks = asks
        self._drawn: object = None
        self.reader = ProfileReader(folder)
        self.poller = self.follow(watch_profile(self.reader))

    def compose_body(self) -> ComposeResult:
        yield TextLine(id="profile-status")
        yield Lines(id="profile", empty_text=Text(""))

    def on_mount(self) -> None:
        self.query_one("#profile").focus()
        if self._asks and not self.folder.profiles.exists():
            self._take_profile()

    @property
    def has_content(self) -> bool:
        return self.poller.has_polled

    def update_content(self) -> None:
        self.show_title(f"{printable(self.folder.name)}   profile")
        stored = self.poller.value if self.poller.problem is None else None
        self.show_line("#profile-status", self._status_line(stored))
        lines = self.query_one("#profile", Lines)
        drawn = (stored, lines.text_width)
        if lines.text_width > 0 and drawn != self._drawn:
            self._drawn = drawn
            lines.set_texts([] if stored is None else self._content(*stored, lines.text_width))

    def _content(self, name: str, profile: Profile, width: int) -> list[Text]:
        traces = trace_lines(profile, str(self.folder.profiles / name))
        return [*profile_lines(profile, width), *(part for line in traces for part in wrap_text(line, width))]

    def _status_line(self, stored: tuple[str, Profile] | None) -> Text:
        """Return which profile is shown, or what the screen waits for."""
        poller, reader = self.poller, self.reader
        line = Text(" ", no_wrap=True, overflow="ellipsis", end="")
        if (asked_at := reader.asked_at) is not None:
            seconds = format_duration(time.monotonic() - asked_at)
            line.append(f"Waiting for {pluralize(DEFAULT_PROFILE_STEPS, 'profiled step')}, {seconds}", STRONG)
            return line.append("; a pause or a validation delays them", MUTED)
        if reader.answer:
            line.append(f"{printable(str(reader.answer))}   ", WARNING)
        if poller.problem is not None:
            return line.append(printable(str(poller.problem)), BAD)
        if stored is None:
            hint = "press P to take one" if reader.is_live else "only a live run can be profiled"
            return line.append(f"No profile yet; {hint}" if poller.has_polled else "Loading …", MUTED)
        name, profile = stored
        taken = time.strftime("   taken %F %H:%M", time.localtime(profile.time))
        return line.append("Where the time of a step goes", STRONG).append(f"   {name}{taken}", MUTED)

    def is_available(self, action: str) -> bool:
        return action != "profile" or (self.reader.is_live and self.reader.asked_at is None)

    def action_profile(self) -> None:
        """Ask the run for another profile, after a question."""
        steps = pluralize(DEFAULT_PROFILE_STEPS, "step")
        question = f"Profile {steps} of {printable(self.folder.name)}? They take longer."
        confirm(self.app, question, "Do not profile", "Profile", self._take_profile)

    def _take_profile(self) -> None:
        if self.reader.asked_at is not None:
            return
        if not self.folder.is_owned():
            self.gputrain_app.show_toast(Problem("", f"{self.folder.name} is not running", code="not-running"))
            return
        self.reader.expect_profile()
        request = partial(send_request, self.folder.control, "profile", steps=DEFAULT_PROFILE_STEPS)
        self.act(request, failed=self.reader.forget_request)
        self.update_if_on_top()
