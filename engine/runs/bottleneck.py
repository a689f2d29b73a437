"""What limits a run, in a sentence: the data, one slow rank, a GPU that is slowed down, steps that are too small, or
nothing but the speed of the machine.

Without all its inputs there is no diagnosis: none is better than a wrong one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.config.pipeline import PIPELINE_FROM_CONFIG
from engine.runs.events import EpochEvent, RunStarted
from engine.runs.records import GpuSample, RankEpochTiming

# Waiting of a share less than this is none that is worth a change.
MAX_DATA_WAIT_SHARE = 0.10
# A straggler exceeds all four limits: less happens by chance.
STRAGGLER_RATIO = 1.25  # its time of data and forward passes, vs. the median of the other ranks
STRAGGLER_WAIT_SHARE = 0.05  # share of the epoch that the other ranks lose to it
STRAGGLER_EPOCHS = 3  # consecutive epochs, or all of a shorter session
STRAGGLER_MIN_LOST_SECONDS = 0.5  # lost in these epochs together
# Steps are too small of which more than this share is not for their images.
MAX_FIXED_COST_SHARE = 0.5
# By so much the least step may have been slower than the others by chance.
MAX_STEP_NOISE_RATIO = 1.5
# A GPU is throttled below this share of its highest clock, in so many consecutive samples.
MIN_FULL_CLOCK_SHARE = 0.95
THROTTLE_MIN_SAMPLES = 3
# What of the driver's words holds clocks down against the will of who trains, the gravest first.
THROTTLE_CAUSES = {
    "hardware thermal": "heat",
    "thermal": "heat",
    "power brake": "power",
    "power cap": "power",
    "hardware slowdown": "heat or power",
}
SHORT_UUID_CHARS = 12


class BottleneckKind(StrEnum):
    DATA = "waiting for data"
    STRAGGLER = "waiting for a slow rank"
    THROTTLED = "slowed down"
    SMALL_STEPS = "too little work a step"
    COMPUTE = "compute-bound"


@dataclass(frozen=True)
class Bottleneck:
    kind: BottleneckKind
    message: str

    @classmethod
    def from_dict(cls, values: object) -> Bottleneck | None:
        """The `verdict` of a summary.json; None where it has another form."""
        match values:
            case {"kind": str(kind), "message": str(message)} if kind in list(BottleneckKind):
                return cls(BottleneckKind(kind), message)
        return None


@dataclass(frozen=True)
class GpuThrottling:
    """A GPU whose clock is held down by `cause`, for `samples` consecutive samples, the first at `since`, in
    Unix seconds; at the latest it ran at `clock_mhz` MHz."""

    cause: str
    since: float
    samples: int
    clock_mhz: float


def diagnose(
    started: RunStarted | None, epochs: Sequence[EpochEvent], throttling: Mapping[str, GpuThrottling]
) -> Bottleneck | None:
    """Of a run and its latest epochs, the last of which counts; `throttling` by the UUIDs of GPUs. What helps most
    comes first."""
    if started is None or not epochs or (wait := valid_share(epochs[-1].data_wait)) is None:
        return None
    epoch = epochs[-1]
    held = {uuid: one for uuid, one in throttling.items() if one.samples >= THROTTLE_MIN_SAMPLES}
    rank = _find_straggler(epochs[-STRAGGLER_EPOCHS:])
    if rank is not None:
        return _straggler_bottleneck(started, rank, held, epoch.time)
    if wait > MAX_DATA_WAIT_SHARE:
        return Bottleneck(
            BottleneckKind.DATA, f"waiting for data {wait:.0%} of the time; {_data_wait_advice(started, wait)}"
        )
    if held:
        return _throttling_bottleneck(started, held, epoch.time)
    fixed = fixed_cost_share(started, epoch)
    if fixed is None:
        return None
    if fixed > MAX_FIXED_COST_SHARE:
        if started.compiled:
            # It has less of a fixed cost than the step that was timed.
            return None
        message = f"too little work a step: {fixed:.0%} of it is fixed cost; give a larger data.batch_size"
        return Bottleneck(BottleneckKind.SMALL_STEPS, message)
    if set(started.devices) == {"cpu"}:
        return Bottleneck(BottleneckKind.COMPUTE, "CPU-bound: a GPU, more cores or a smaller model would help")
    return Bottleneck(BottleneckKind.COMPUTE, "GPU-bound: lower precision or model.compile may help")


def valid_share(value: float | None) -> float | None:
    """What was no number is None in a journal, and NaN before."""
    return value if value is not None and 0 <= value <= 1 else None


def positive_or_none(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


def model_flops_utilization(started: RunStarted | None, epoch: EpochEvent | None) -> float | None:
    """Model FLOPs utilization (Chowdhery et al.: PaLM, 2022, appendix B): the operations that the model needs for the
    images of a second, by what the GPUs could do; None where one of these is not known."""
    if started is None or epoch is None:
        return None
    flops, peak, rate = (
        positive_or_none(started.flops),
        positive_or_none(started.peak_tflops),
        positive_or_none(epoch.images_per_second),
    )
    return None if flops is None or peak is None or rate is None else round(flops * rate / (peak * 1e12), 4)


def describe_efficiency(data_wait: float | None, mfu: float | None) -> str:
    """Those that are known."""
    known = {"data wait": valid_share(data_wait), "MFU": valid_share(mfu)}
    return "   ".join(f"{name} {value:.0%}" for name, value in known.items() if value is not None)


def fixed_cost_share(started: RunStarted, epoch: EpochEvent) -> float | None:
    """Of the time that a rank takes for a batch, what would stay if it had no images: by a straight line through it and
    the least step. None where one is not known, or where the least step took longer than a whole one: then something
    else on the machine came between."""
    least, rate = positive_or_none(started.least_step), positive_or_none(epoch.images_per_second)
    few, many = started.least_images, started.batch_size
    if least is None or rate is None or not 0 < few < many:
        return None
    seconds = many * started.world_size / rate
    fixed = (least * many - seconds * few) / (many - few)
    return min(max(fixed / seconds, 0.0), 0.99) if fixed <= MAX_STEP_NOISE_RATIO * seconds else None


def _data_wait_advice(started: RunStarted, wait_share: float) -> str:
    less = "smaller images or fewer augmentations"
    if started.pipeline == "memory":
        return f"try {less}"
    # So many as make batches as fast as they are taken; none waits while this process makes them itself.
    wanted = math.ceil((started.workers or wait_share) / (1 - min(wait_share, 0.99)))
    workers = max(wanted, started.workers + 1)
    if started.cores and workers > started.cores:
        # Where it was not asked for there is a reason against the other.
        return (
            f"out of cores: try {'data.pipeline=auto, ' if started.pipeline_why == PIPELINE_FROM_CONFIG else ''}{less}"
        )
    return f"try data.workers={workers}"


@dataclass(frozen=True)
class Straggler:
    """What it did in the latest epoch, and the median of the others."""

    timing: RankEpochTiming
    median_of_others: RankEpochTiming


def _find_straggler(epochs: Sequence[EpochEvent]) -> Straggler | None:
    found = [slow for epoch in epochs if (slow := _straggler_of_epoch(epoch.work)) is not None]
    if len(found) < len(epochs) or len({one.timing.rank for one in found}) != 1:
        return None
    lost = sum(one.timing.local_seconds - one.median_of_others.local_seconds for one in found)
    return found[-1] if lost >= STRAGGLER_MIN_LOST_SECONDS else None


def _straggler_of_epoch(timings: Sequence[RankEpochTiming]) -> Straggler | None:
    """The rank that holds up the others, if one does."""
    if len(timings) < 2:
        return None
    slow = max(timings, key=lambda one: one.local_seconds)
    others = [one for one in timings if one is not slow]
    waited = statistics.median(one.waited for one in others)
    forward = statistics.median(one.forward for one in others)
    usual = statistics.median(one.local_seconds for one in others)
    lost = slow.local_seconds - usual
    if slow.local_seconds <= STRAGGLER_RATIO * usual or lost <= STRAGGLER_WAIT_SHARE * slow.seconds or forward == 0:
        return None
    # Where the others wait for data as well, it is not this rank that holds them up.
    if waited > MAX_DATA_WAIT_SHARE * slow.seconds:
        return None
    return Straggler(slow, RankEpochTiming(-1, slow.seconds, waited, forward))


def _straggler_bottleneck(
    started: RunStarted, straggler: Straggler, throttled: Mapping[str, GpuThrottling], now: float
) -> Bottleneck:
    mine, others = straggler.timing, straggler.median_of_others
    device = next((one.device for one in started.ranks if one.rank == mine.rank), "")
    if device in throttled:
        return _throttling_bottleneck(started, {device: throttled[device]}, now)
    name = f"rank {mine.rank} ({device[:SHORT_UUID_CHARS]})" if device else f"rank {mine.rank}"
    if mine.waited - others.waited > mine.forward - others.forward:
        why = f"which waits for data {mine.waited / mine.seconds:.0%} of the time"
    else:
        why = f"whose forward pass takes {mine.forward / others.forward:.1f} x the others'"
    return Bottleneck(BottleneckKind.STRAGGLER, f"waiting for {name}, {why}")


def update_throttling(sample: GpuSample, sampled_at: float, previous: GpuThrottling | None) -> GpuThrottling | None:
    """Return the throttling of a GPU after one more sample. A sample without a clock changes nothing."""
    clock, most = positive_or_none(sample.sm_clock), positive_or_none(sample.max_sm_clock)
    if sample.throttle is None or clock is None:
        return previous
    cause = next((cause for word, cause in THROTTLE_CAUSES.items() if word in sample.throttle), None)
    if cause is None or (most is not None and clock >= MIN_FULL_CLOCK_SHARE * most):
        return None
    return GpuThrottling(
        cause, previous.since if previous else sampled_at, previous.samples + 1 if previous else 1, clock
    )


def _throttling_bottleneck(started: RunStarted, throttled: Mapping[str, GpuThrottling], now: float) -> Bottleneck:
    """Of several GPUs the one that was first is named."""
    uuid, first = min(throttled.items(), key=lambda one: one[1].since)
    rank = next((f" (rank {one.rank})" for one in started.ranks if one.device == uuid), "")
    more = f" and {len(throttled) - 1} more" if len(throttled) > 1 else ""
    day, today = (time.strftime("%Y-%m-%d ", time.localtime(one)) for one in (first.since, now))
    since = ("" if day == today else day) + time.strftime("%H:%M", time.localtime(first.since))
    message = (
        f"{uuid[:SHORT_UUID_CHARS]}{rank}{more} slowed down by {first.cause} since {since}, now at "
        f"{first.clock_mhz:.0f} MHz"
    )
    return Bottleneck(BottleneckKind.THROTTLED, message)
