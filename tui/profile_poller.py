"""The thread behind the profile screen: it reads stored profiles, and waits for the answer to a request."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runs.folder import RunFolder
from engine.utils.errors import Problem
from engine.utils.files import file_size
from tui.pollers import Poller

if TYPE_CHECKING:
    from engine.runs.journal import JournalReader
    from engine.runs.profile_file import Profile

POLL_INTERVAL_SECONDS = 0.5


@dataclass(frozen=True)
class StoredProfile:
    """One profile of a run: its folder, its number among `count` profiles, the newest being 1, and its content.

    `profile` is None if it cannot be read; `problem` says why.
    """

    name: str
    number: int
    count: int
    profile: Profile | None
    problem: Problem | None = None


class ProfilePoller(Poller):
    """Publishes one stored profile of a run, and follows a request for a new one."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__("profile", POLL_INTERVAL_SECONDS)
        self._folder = folder
        self._number = 1
        self._names: list[str] = []
        self._answers: JournalReader | None = None
        self._loaded: tuple[str, int] | None = None
        self.latest: StoredProfile | None = None
        self.has_polled = False
        self.is_live = False
        """Whether a process owns the run."""
        self.asked_at: float | None = None
        """When a profile was requested, in seconds of the monotonic clock; None if no request is unanswered."""
        self.answer: Problem | None = None
        """Why the latest request gave no profile; None if it did."""

    def expect_profile(self) -> None:
        """Wait for the answer to a request that is sent now."""
        from engine.runs.journal import JournalReader

        reader = JournalReader(self._folder.journal)
        reader.offset = file_size(self._folder.journal)
        self._answers, self.asked_at, self.answer, self._number = reader, time.monotonic(), None, 1

    def forget_request(self) -> None:
        """Wait no longer, because the request could not be sent."""
        self._answers = self.asked_at = None

    def select(self, offset: int) -> None:
        """Show an older profile (1) or a newer one (-1)."""
        self._number = min(max(self._number + offset, 1), max(len(self._names), 1))
        self.request_poll()

    def poll(self) -> None:
        from engine.runs.profile_file import list_profiles

        self.is_live = self._folder.is_owned()
        self._poll_answer()
        self._names = list_profiles(self._folder)
        if not self._names:
            self.latest = self._loaded = None
        else:
            number = min(self._number, len(self._names))
            name = self._names[number - 1]
            # A profile does not change, but the run may still be writing one that cannot be read.
            is_unread = self.latest is None or self.latest.profile is None or self.latest.number != number
            if is_unread or self._loaded != (name, len(self._names)):
                self.latest = self._read(name, number, len(self._names))
                self._loaded = (name, len(self._names))
        self.has_polled = True

    def _poll_answer(self) -> None:
        from engine.runs.events import Profiled

        if self._answers is None:
            return
        answer = next((event for event in self._answers.poll() if isinstance(event, Profiled)), None)
        if answer is not None:
            reason = f"No profile was taken: {answer.message}"
            self.answer = None if answer.folder else Problem("", reason, code="not-recorded")
        elif not self.is_live:
            self.answer = Problem("", "The run ended before the profile", code="not-running")
        else:
            return
        self._answers, self.asked_at, self._loaded = None, None, None

    def _read(self, name: str, number: int, count: int) -> StoredProfile:
        from engine.runs.profile_file import read_profile
        from engine.utils.codec import InvalidRecordError

        try:
            return StoredProfile(name, number, count, read_profile(self._folder, name))
        except InvalidRecordError as error:
            return StoredProfile(name, number, count, None, Problem("", f"{name} {error}", code=error.code))
