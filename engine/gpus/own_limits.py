"""The user's limits on GPUs and runs at once, counted over the reservations of this user on this host.

Called by `allocation` while it selects GPUs. Every run that uses GPUs or waits for the CPU has a reservation. A run
that uses the CPU at once has none, and does not count.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from engine.base.errors import Problem, UsageError
from engine.base.text import list_names, pluralize
from engine.config.limits import NO_LIMITS, limit_text, requested_gpus, too_many_gpus
from engine.config.settings import Limits
from engine.gpus.queue_terms import own_order
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.selection import CPU, CudaDevice, NotFreeError

LIMIT_ADVICE = "wait with --queue, or raise the limit there"


class OverLimitError(NotFreeError):
    """A limit is reached because of other runs of this user."""


@dataclass
class OwnRuns:
    """The other runs of this user, in view of a run that asks for the devices of `selection`."""

    limits: Limits = NO_LIMITS
    selection: str = ""
    num_visible: int = 0
    running: Sequence[ReservationInfo] = ()
    ahead: Sequence[ReservationInfo] = ()
    """Runs that wait before this one; none for a run that does not wait."""

    def update(self, reservations: Sequence[ReservationInfo], key: tuple[int, str] | None, *, wait: bool) -> None:
        """Read the reservations of all runs. `key` is that of this run, None if it has none yet."""
        own = [each for each in reservations if each.uid == os.geteuid()]
        mine = next((each for each in own if each.key == key), None)
        self.running = [each for each in own if not each.is_waiting and each is not mine]
        candidates = [each for each in own if each.is_waiting and each.has_arrived and each is not mine]
        self.ahead = [each for each in candidates if wait and (mine is None or own_order(each) < own_order(mine))]

    @property
    def held(self) -> set[str]:
        """The GPUs that the runs of this user hold."""
        return {name for each in self.running for name in each.gpus if name != CPU.uuid}

    def reached(self) -> str:
        """Return which limit keeps the run from its start now, "" if none does.

        Raises UsageError if the run exceeds one whatever else runs."""
        runs, gpus = self.limits.runs, self.limits.gpus
        if runs is not None and len(self.running) + len(self.ahead) >= runs:
            return self._describe("runs", runs)
        wanted = requested_gpus(self.selection, self.num_visible)
        if gpus is None or wanted == 0:
            return ""
        if wanted > gpus:
            raise UsageError([too_many_gpus(self.selection, wanted, gpus)])
        return self._describe("gpus", gpus) if wanted > self._num_left(gpus) else ""

    def _num_left(self, gpus: int) -> int:
        waiting = sum(requested_gpus(each.selection, len(each.visible)) for each in self.ahead)
        return gpus - len(self.held) - waiting

    def _describe(self, key: str, limit: int) -> str:
        """Return a limit that is reached, and by which runs."""
        names = list_names([each.run for each in self.running])
        used = f"running: {names}" if key == "runs" else f"{pluralize(len(self.held), 'GPU')} used by {names}"
        parts = [used] if self.running else []
        parts += [f"{pluralize(len(self.ahead), 'run')} of yours before this one"] if self.ahead else []
        return f"{limit_text(key, limit)}; {', '.join(parts)}"

    def check_chosen(self, chosen: Sequence[CudaDevice]) -> tuple[list[CudaDevice], list[Problem]]:
        """Return the chosen devices, of "auto" no more than the limit leaves, with a warning if that is less."""
        gpus = self.limits.gpus
        chosen = list(chosen)
        if gpus is None or not chosen:
            return chosen, []
        left = max(self._num_left(gpus), 1)
        if self.selection != "auto" or len(chosen) <= left:
            return chosen, []
        reason = f"auto uses {left} of {pluralize(len(chosen), 'free GPU')}: {limit_text('gpus', gpus)}"
        return chosen[:left], [Problem("", reason, code="over-limit")]


def over_limit(reason: str) -> UsageError:
    """Return the error of a run that does not wait."""
    return OverLimitError.one("", reason, LIMIT_ADVICE, code="over-limit")
