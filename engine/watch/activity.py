"""Whether a run of another program goes on, judged by what moves: its files, its logs, and a process that is watched.

`run_list` judges each run with it, for lists and screens.
"""

from __future__ import annotations

import time
from enum import StrEnum

from engine.base.units import format_age

# torch's SummaryWriter writes every 120 s, and an epoch may be longer than that.
GROWING_SECONDS = 180.0


class Activity(StrEnum):
    """What a run of another program does. Only what its files and processes tell is known."""

    GROWING = "growing"
    """One of its files was written in the last `GROWING_SECONDS`."""
    QUIET = "quiet"
    """Nothing was written for longer. It may have ended, or crashed, or be in a long epoch."""
    ENDED = "ended"
    """Its log says so, or the process that is watched has ended."""


def judge(changed_at: float, now: float, *, has_ended: bool = False, writer_ended_at: float | None = None) -> Activity:
    """Return the activity of a run.

    `changed_at` is when its files were last written. `has_ended` is what its log says, and `writer_ended_at` when the
    watched process of the run was missed, None if none is watched: what is written later has another writer.
    """
    if has_ended or (writer_ended_at is not None and changed_at <= writer_ended_at):
        return Activity.ENDED
    return Activity.GROWING if now - changed_at < GROWING_SECONDS else Activity.QUIET


def activity_text(state: str, changed_at: float | None) -> str:
    """Return a state as lists show it: `quiet for 12 min`."""
    if state != Activity.QUIET or changed_at is None:
        return state
    return f"{state} for {format_age(max(time.time() - changed_at, 0.0))}"
