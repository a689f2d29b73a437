"""What a host has said: `HostReading`, the answer of `watch` for one host.

A host may be hostile, so its answers are parsed as data of limited size; whoever shows them escapes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.gpus.snapshot import Snapshot
from engine.runs.run_row import RunRow


class HostState(StrEnum):
    """How current a reading is: not reached yet, current, without news for a while, or out of reach."""

    CONNECTING = "connecting"
    OK = "ok"
    STALE = "stale"
    DOWN = "down"


@dataclass(frozen=True)
class HostReading:
    """The last word of a host. The same object means that nothing has changed.

    `snapshot` has its GPUs and their processes, None if it said nothing of them; those of a stale or lost host are
    stale, too. `rows` are its live and newest runs, whose folders are paths on that host. `age_s` are the whole seconds
    since its last word if the host is stale or down, None without one. `reason` says why the host is stale or down, or
    what it lacks, such as a driver; often in the words of ssh. `must_ask` means that ssh would ask for a password or
    for a new host key, see `HostWatch.ask`.
    """

    name: str
    state: HostState = HostState.CONNECTING
    reason: str = ""
    age_s: int | None = None
    snapshot: Snapshot | None = None
    rows: tuple[RunRow, ...] = ()
    has_gputrain: bool = False
    must_ask: bool = False
