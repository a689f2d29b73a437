"""Profiles of training steps for the tests that read or show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.runs import profile_file
from engine.runs.folder import RunFolder
from engine.runs.profile_file import (
    PARTS,
    PartTime,
    Profile,
    RankProfile,
    trace_name,
)
from support.runs.event_factories import make_run_started, make_step
from support.runs.factories import make_run_folder

STEPS = 4
# Milliseconds of each part of a step, in the order of PARTS.
BALANCED = (1.0, 32.0, 64.0, 2.0, 1.0)
FAST_RANK, SLOW_RANK = (1.0, 20.0, 90.0, 2.0, 1.0), (1.0, 69.0, 41.0, 2.0, 1.0)
STARVED = (60.0, 12.0, 25.0, 2.0, 1.0)


def make_rank_profile(rank: int, milliseconds: tuple[float, ...] = BALANCED, **fields: Any) -> RankProfile:
    parts = {part: PartTime(mean=ms / 1e3, median=ms / 1e3) for part, ms in zip(PARTS, milliseconds, strict=True)}
    seconds = sum(milliseconds) / 1e3
    defaults = {"host": "h", "device": "cpu"}
    return RankProfile(
        **{"rank": rank, "steps": [seconds] * STEPS, "parts": parts, "trace": trace_name(rank)} | defaults | fields
    )


def make_profile(*ranks: RankProfile, **fields: Any) -> Profile:
    defaults = {"time": 1_700_000_000.0, "step": 120, "epoch": 3, "steps": STEPS, "requested": STEPS}
    defaults |= {"device_type": "cpu", "batch_size": 32}
    return Profile(**defaults | {"ranks": list(ranks) or [make_rank_profile(0), make_rank_profile(1)]} | fields)


def store_profile(run: RunFolder, profile: Profile) -> str:
    """Write a profile with small traces; return the name of its folder."""
    return profile_file.store_profile(run, profile, {rank.rank: b"trace" for rank in profile.ranks})


PROFILE = make_profile(make_rank_profile(0, FAST_RANK), make_rank_profile(1, SLOW_RANK))


def make_profiled_run(root: Path) -> RunFolder:
    """Create a run `a` with a stored profile."""
    run = make_run_folder(root, "a", make_run_started(), make_step(10))
    store_profile(run, PROFILE)
    return run
