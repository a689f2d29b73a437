"""The runs in the trash, for `gputrain runs trash`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from engine.runs.manage import RunContents, TrashedRun
from engine.show.table import Align, Column, Shorten
from engine.utils.units import format_age, format_bytes, format_count
from tui.palette import STRONG


def trash_columns(contents: Mapping[str, RunContents]) -> list[Column[TrashedRun]]:
    """Return the columns for runs whose contents are known by the name of their entry."""
    return [
        Column("name", "name", lambda run: run.entry, width=12, max_width=48, priority=1, flex=True, style=STRONG,
               shorten=Shorten.MIDDLE),
        Column("deleted", "deleted", lambda run: f"{format_age(max(time.time() - run.deleted_at, 0))} ago"),
        Column("size", "size", lambda run: format_bytes(contents[run.entry].size_bytes), Align.RIGHT),
        Column("checkpoints", "checkpoints", lambda run: format_count(contents[run.entry].checkpoints), Align.RIGHT),
    ]  # fmt: skip
