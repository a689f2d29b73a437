"""Diagnose a profile: name the straggler. Without one, name the largest part of the steps.

The words and limits are those of `engine.runs.bottleneck`, which diagnoses whole epochs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.runs.bottleneck import MAX_DATA_WAIT_SHARE, find_straggler
from engine.runs.profile_file import PARTS, Part, Profile, RankProfile
from engine.runs.records import RankEpochTiming

PART_NAMES: dict[Part, str] = {
    "data": "data",
    "copy": "copy",
    "forward": "forward",
    "backward": "backward",
    "allreduce": "all-reduce",
    "optimizer": "optimizer",
    "other": "other",
}
# Subject of a sentence about each part of the steps of a rank.
_PHRASES: dict[Part, str] = {
    "copy": "copy to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "other": "time between the parts of a step",
}
# Above this share of the step, the all-reduce or the gaps are worth a hint.
MAX_EXPOSED_SHARE = 0.2


@dataclass(frozen=True)
class ProfileDiagnosis:
    """One sentence about a profile, and the rank of its straggler (None without one)."""

    message: str
    straggler: int | None = None


def diagnose_profile(profile: Profile) -> ProfileDiagnosis:
    """Return what takes the time of the profiled steps."""
    straggler = _find_straggler(profile.ranks)
    if straggler is not None:
        return ProfileDiagnosis(_describe_straggler(straggler, profile.ranks), straggler.rank)
    shares = {
        part: statistics.fmean(rank.mean(part) / max(rank.step_seconds, 1e-9) for rank in profile.ranks)
        for part in PARTS
    }
    is_gpu = profile.device_type == "cuda"
    if shares["data"] > MAX_DATA_WAIT_SHARE:
        return ProfileDiagnosis(f"waiting for data {shares['data']:.0%} of the time{_slowest_stage(profile.ranks)}")
    if shares["allreduce"] > MAX_EXPOSED_SHARE:
        advice = "larger batches or optim.accumulate make it rarer"
        return ProfileDiagnosis(f"waiting for the all-reduce {shares['allreduce']:.0%} of the time; {advice}")
    if is_gpu and shares["other"] > MAX_EXPOSED_SHARE:
        advice = "increase data.batch_size, or try model.compile"
        return ProfileDiagnosis(
            f"too little work per step: the GPU is idle {shares['other']:.0%} of the time; {advice}"
        )
    largest = max(PARTS, key=lambda part: shares[part])
    device = "GPU" if is_gpu else "CPU"
    return ProfileDiagnosis(f"{device}-bound: {PART_NAMES[largest]} takes {shares[largest]:.0%} of the step")


def _find_straggler(ranks: Sequence[RankProfile]) -> RankProfile | None:
    """Return the rank whose own work takes longer than that of the others, who wait for it."""
    if any("allreduce" not in rank.parts for rank in ranks):
        return None
    waits = [rank.mean("data") for rank in ranks]
    straggler = find_straggler(
        [
            RankEpochTiming(index, rank.step_seconds, wait, rank.own_seconds - wait)
            for index, (rank, wait) in enumerate(zip(ranks, waits, strict=True))
        ]
    )
    return None if straggler is None else ranks[straggler.timing.rank]


def _describe_straggler(slowest: RankProfile, ranks: Sequence[RankProfile]) -> str:
    others = [rank for rank in ranks if rank is not slowest]
    medians = {part: statistics.median(rank.mean(part) for rank in others) for part in PARTS}
    own_parts = [part for part in PARTS if part != "allreduce"]
    part = max(own_parts, key=lambda part: slowest.mean(part) - medians[part])
    mine, median = slowest.mean(part), medians[part]
    if part == "data":
        why = f"it waits for data {mine / slowest.step_seconds:.0%} of the time{_slowest_stage([slowest])}"
    elif median > 0:
        why = f"its {_PHRASES[part]} takes {mine / median:.1f}x the median"
    else:
        why = f"its {_PHRASES[part]} takes {mine * 1e3:.1f} ms"
    return f"waiting for rank {slowest.rank}: {why}"


def _slowest_stage(ranks: Sequence[RankProfile]) -> str:
    """Return a clause about the stage of the input that takes most of its time; "" if the stages are unknown."""
    totals: dict[str, float] = {}
    for rank in ranks:
        for stage, seconds in (rank.input.seconds if rank.input is not None else {}).items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    whole = sum(totals.values())
    if whole <= 0:
        return ""
    stage = max(totals, key=lambda name: totals[name])
    return f"; {stage} takes {totals[stage] / whole:.0%} of the time of the input"
