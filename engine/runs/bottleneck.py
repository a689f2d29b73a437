"""What limits a run, in a sentence: the data, one slow rank, a GPU that is slowed down, steps that are too small, or
nothing but the speed of the machine.

Where something that a verdict needs is not known there is none: none is better than a wrong one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.config.pipeline import PIPELINE_ASKED
from engine.runs.events import Epoch, RunStarted
from engine.runs.records import GpuSample, RankEpochTiming

# Waiting of a share less than this is none that is worth a change.
MOST_WAIT = 0.10
# A straggler exceeds all four limits: less happens by chance.
SLOW_TIMES = 1.25  # its time of data and forward passes, vs. the median of the other ranks
SLOW_SHARE = 0.05  # share of the epoch that the other ranks lose to it
SLOW_EPOCHS = 3  # consecutive epochs, or all of a shorter session
SLOW_SECONDS = 0.5  # lost in these epochs together
# Steps are too small of which more than this share is not for their images.
MOST_FIXED = 0.5
# By so much the least step may have been slower than the others by chance.
MOST_CHANCE = 1.5
# A GPU is throttled below this share of its highest clock, in so many consecutive samples.
FULL_CLOCK = 0.95
SLOWED_LOOKS = 3
# What of the driver's words holds clocks down against the will of who trains, the gravest first.
CAUSES = {
    "hardware thermal": "heat",
    "thermal": "heat",
    "power brake": "power",
    "power cap": "power",
    "hardware slowdown": "heat or power",
}
SHOWN_UUID = 12


class Kind(StrEnum):
    DATA = "waiting for data"
    RANK = "waiting for a slow rank"
    SLOWED = "slowed down"
    SMALL_STEPS = "too little work a step"
    COMPUTE = "compute-bound"


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    message: str

    @classmethod
    def from_dict(cls, values: object) -> Verdict | None:
        """The verdict of a summary; None where it is of another form."""
        match values:
            case {"kind": str(kind), "message": str(message)} if kind in list(Kind):
                return cls(Kind(kind), message)
        return None


@dataclass(frozen=True)
class Slowed:
    """A GPU whose clock is held down by `cause`, in `looks` looks in a row, the first of which was at `since`, in Unix
    seconds; at the latest it ran at `clock` MHz."""

    cause: str
    since: float
    looks: int
    clock: float


def judge(started: RunStarted | None, epochs: Sequence[Epoch], slowed: Mapping[str, Slowed]) -> Verdict | None:
    """Of a run and its latest epochs, the last of which counts; `slowed` by the UUIDs of GPUs. What helps most comes
    first."""
    if started is None or not epochs or (wait := share_of(epochs[-1].data_wait)) is None:
        return None
    epoch = epochs[-1]
    held = {uuid: one for uuid, one in slowed.items() if one.looks >= SLOWED_LOOKS}
    rank = _slow_rank(epochs[-SLOW_EPOCHS:])
    if rank is not None:
        return _waiting_for(started, rank, held, epoch.time)
    if wait > MOST_WAIT:
        return Verdict(Kind.DATA, f"waiting for data {wait:.0%} of the time; {_how_to_wait_less(started, wait)}")
    if held:
        return _slowed(started, held, epoch.time)
    fixed = fixed_share(started, epoch)
    if fixed is None:
        return None
    if fixed > MOST_FIXED:
        if started.compiled:
            # It has less of a fixed cost than the step that was timed.
            return None
        message = f"too little work a step: {fixed:.0%} of it is fixed cost; give a larger data.batch_size"
        return Verdict(Kind.SMALL_STEPS, message)
    if set(started.devices) == {"cpu"}:
        return Verdict(Kind.COMPUTE, "CPU-bound: a GPU, more cores or a smaller model would help")
    return Verdict(Kind.COMPUTE, "GPU-bound: lower precision or model.compile may help")


def share_of(value: float | None) -> float | None:
    """What was no number is None in a journal, and NaN before."""
    return value if value is not None and 0 <= value <= 1 else None


def positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


def utilization(started: RunStarted | None, epoch: Epoch | None) -> float | None:
    """Model FLOPs utilization (Chowdhery et al.: PaLM, 2022, appendix B): the operations that the model needs for the
    images of a second, by what the GPUs could do; None where one of these is not known."""
    if started is None or epoch is None:
        return None
    flops, peak, rate = positive(started.flops), positive(started.peak_tflops), positive(epoch.images_per_second)
    return None if flops is None or peak is None or rate is None else round(flops * rate / (peak * 1e12), 4)


def figures_in_words(data_wait: float | None, mfu: float | None) -> str:
    """Those that are known."""
    known = {"data wait": share_of(data_wait), "MFU": share_of(mfu)}
    return "   ".join(f"{name} {value:.0%}" for name, value in known.items() if value is not None)


def fixed_share(started: RunStarted, epoch: Epoch) -> float | None:
    """Of the time that a rank takes for a batch, what would stay if it had no images: by a straight line through it and
    the least step. None where one is not known, or where the least step took longer than a whole one: then something
    else on the machine came between."""
    least, rate = positive(started.least_step), positive(epoch.images_per_second)
    few, many = started.least_images, started.batch_size
    if least is None or rate is None or not 0 < few < many:
        return None
    seconds = many * started.world_size / rate
    fixed = (least * many - seconds * few) / (many - few)
    return min(max(fixed / seconds, 0.0), 0.99) if fixed <= MOST_CHANCE * seconds else None


def _how_to_wait_less(started: RunStarted, wait: float) -> str:
    less = "smaller images or fewer augmentations"
    if started.pipeline == "memory":
        return f"try {less}"
    # So many as make batches as fast as they are taken; none waits while this process makes them itself.
    wanted = math.ceil((started.workers or wait) / (1 - min(wait, 0.99)))
    workers = max(wanted, started.workers + 1)
    if started.cores and workers > started.cores:
        # Where it was not asked for there is a reason against the other.
        return f"out of cores: try {'data.pipeline=auto, ' if started.pipeline_why == PIPELINE_ASKED else ''}{less}"
    return f"try data.workers={workers}"


@dataclass(frozen=True)
class SlowRank:
    """What it did in the latest epoch, and the median of the others."""

    mine: RankEpochTiming
    others: RankEpochTiming


def _slow_rank(epochs: Sequence[Epoch]) -> SlowRank | None:
    found = [slow for epoch in epochs if (slow := _slowest(epoch.work)) is not None]
    if len(found) < len(epochs) or len({one.mine.rank for one in found}) != 1:
        return None
    lost = sum(one.mine.local_seconds - one.others.local_seconds for one in found)
    return found[-1] if lost >= SLOW_SECONDS else None


def _slowest(timings: Sequence[RankEpochTiming]) -> SlowRank | None:
    """The rank that holds up the others, if one does."""
    if len(timings) < 2:
        return None
    slow = max(timings, key=lambda one: one.local_seconds)
    others = [one for one in timings if one is not slow]
    waited = statistics.median(one.waited for one in others)
    forward = statistics.median(one.forward for one in others)
    usual = statistics.median(one.local_seconds for one in others)
    lost = slow.local_seconds - usual
    if slow.local_seconds <= SLOW_TIMES * usual or lost <= SLOW_SHARE * slow.seconds or forward == 0:
        return None
    # Where the others wait for data as well, it is not this rank that holds them up.
    if waited > MOST_WAIT * slow.seconds:
        return None
    return SlowRank(slow, RankEpochTiming(-1, slow.seconds, waited, forward))


def _waiting_for(started: RunStarted, slow: SlowRank, held: Mapping[str, Slowed], now: float) -> Verdict:
    mine, others = slow.mine, slow.others
    device = next((one.device for one in started.ranks if one.rank == mine.rank), "")
    if device in held:
        return _slowed(started, {device: held[device]}, now)
    name = f"rank {mine.rank} ({device[:SHOWN_UUID]})" if device else f"rank {mine.rank}"
    if mine.waited - others.waited > mine.forward - others.forward:
        why = f"which waits for data {mine.waited / mine.seconds:.0%} of the time"
    else:
        why = f"whose forward pass takes {mine.forward / others.forward:.1f} x the others'"
    return Verdict(Kind.RANK, f"waiting for {name}, {why}")


def slowed_by(sample: GpuSample, at: float, before: Slowed | None) -> Slowed | None:
    """What a look at a GPU says of its clock, after what the look before said. A look that tells nothing changes
    nothing."""
    clock, most = positive(sample.sm_clock), positive(sample.max_sm_clock)
    if sample.throttle is None or clock is None:
        return before
    cause = next((cause for word, cause in CAUSES.items() if word in sample.throttle), None)
    if cause is None or (most is not None and clock >= FULL_CLOCK * most):
        return None
    return Slowed(cause, before.since if before else at, before.looks + 1 if before else 1, clock)


def _slowed(started: RunStarted, held: Mapping[str, Slowed], now: float) -> Verdict:
    """Of several GPUs the one that was first is named."""
    uuid, first = min(held.items(), key=lambda one: one[1].since)
    rank = next((f" (rank {one.rank})" for one in started.ranks if one.device == uuid), "")
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    day, today = (time.strftime("%Y-%m-%d ", time.localtime(one)) for one in (first.since, now))
    since = ("" if day == today else day) + time.strftime("%H:%M", time.localtime(first.since))
    message = (
        f"{uuid[:SHOWN_UUID]}{rank}{more} slowed down by {first.cause} since {since}, now at {first.clock:.0f} MHz"
    )
    return Verdict(Kind.SLOWED, message)
