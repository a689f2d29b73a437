"""Diagnose the bottleneck of a run: data loading, a straggler, GPU throttling, or compute.

`engine.runs.history` calls `diagnose` with the latest epochs; log, record and screen show the result. If an input is
missing there is no diagnosis, because a wrong one is worse than none.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.base.codec import UnsetType
from engine.runs.events import EpochEvent, RunStarted
from engine.runs.records import Bottleneck, BottleneckKind, GpuSample, RankEpochTiming

# A run that waits less for data is not limited by it.
MAX_DATA_WAIT_SHARE = 0.10
# A straggler exceeds all four limits; less is noise.
STRAGGLER_RATIO = 1.25  # seconds of data wait and forward passes, vs. the median of the other ranks
STRAGGLER_WAIT_SHARE = 0.05  # share of the epoch that the other ranks spend waiting for it
STRAGGLER_EPOCHS = 3  # consecutive epochs, or all epochs of a shorter session
STRAGGLER_MIN_LOST_SECONDS = 0.5  # total over these epochs
# A GPU counts as throttled below this share of its maximum clock in this number of consecutive samples.
MIN_FULL_CLOCK_SHARE = 0.95
THROTTLE_MIN_SAMPLES = 3
# Throttle reasons (see engine.gpus.nvml) that the user did not choose, most serious first.
THROTTLE_CAUSES = {
    "hardware thermal": "heat",
    "thermal": "heat",
    "power brake": "power",
    "power cap": "power",
    "hardware slowdown": "heat or power",
}
# Throttling by heat that lasts this long needs a human, also if something else limits the run.
HEAT_CAUSES = frozenset({"heat", "heat or power"})
HEAT_MIN_SECONDS = 60.0
SHORT_UUID_CHARS = 12


@dataclass(frozen=True)
class GpuThrottling:
    """Ongoing throttling of one GPU because of `cause`: number of consecutive `samples`, Unix time of the first one
    (`since`), and the latest SM clock in MHz."""

    cause: str
    since: float
    samples: int
    clock_mhz: float


def diagnose(
    started: RunStarted | None, epochs: Sequence[EpochEvent], throttling: Mapping[str, GpuThrottling]
) -> Bottleneck | None:
    """Return what limits a run, or None if that is unknown.

    `epochs` are the latest epochs of the session; all but the straggler check use the last one. `throttling` maps GPU
    UUIDs. Of several bottlenecks, the one whose removal helps most is returned.
    """
    if started is None or not epochs or (wait := valid_share(epochs[-1].data_wait)) is None:
        return None
    epoch = epochs[-1]
    throttled = {uuid: state for uuid, state in throttling.items() if state.samples >= THROTTLE_MIN_SAMPLES}
    straggler = _lasting_straggler(epochs[-STRAGGLER_EPOCHS:])
    if straggler is not None:
        return _straggler_bottleneck(started, straggler, throttled, epoch.time)
    if wait > MAX_DATA_WAIT_SHARE:
        return Bottleneck(
            BottleneckKind.DATA, f"waiting for data {wait:.0%} of the time; {_data_wait_advice(started, wait)}"
        )
    if throttled:
        return _throttling_bottleneck(started, throttled, epoch.time)
    if positive_or_none(epoch.images_per_second) is None:
        return None
    message = "GPU-bound: lower precision or model.compile may help"
    if set(started.devices) == {"cpu"}:
        message = "CPU-bound: a GPU, more cores or a smaller model would help"
    return Bottleneck(BottleneckKind.COMPUTE, message)


def valid_share(value: float | UnsetType | None) -> float | None:
    """Return a share from 0 to 1; None for values outside and unknown ones."""
    return value if isinstance(value, float | int) and 0 <= value <= 1 else None


def positive_or_none(value: float | UnsetType | None) -> float | None:
    """Return a positive number; None for anything else."""
    return value if isinstance(value, float | int) and value > 0 else None


def model_flops_utilization(started: RunStarted | None, epoch: EpochEvent | None) -> float | None:
    """Return the model FLOPs utilization (Chowdhery et al., PaLM, 2022, appendix B), 0 to 1.

    That is the FLOPS that the model needs at the measured throughput, divided by the peak FLOPS of the GPUs. None if
    one of them is unknown.
    """
    if started is None or epoch is None:
        return None
    flops, peak, rate = (
        positive_or_none(epoch.flops) or positive_or_none(started.flops),
        positive_or_none(started.peak_tflops),
        positive_or_none(epoch.images_per_second),
    )
    return None if flops is None or peak is None or rate is None else round(flops * rate / (peak * 1e12), 4)


def describe_efficiency(data_wait: float | None, mfu: float | None) -> str:
    """Return data wait and MFU as text, without those that are unknown."""
    shares = {"data wait": valid_share(data_wait), "MFU": valid_share(mfu)}
    return "   ".join(f"{name} {value:.0%}" for name, value in shares.items() if value is not None)


def _data_wait_advice(started: RunStarted, wait_share: float) -> str:
    cheaper_images = "smaller images or fewer augmentations"
    if started.pipeline == "memory":
        return f"try {cheaper_images}"
    # Enough workers to produce batches as fast as the rank consumes them. Without workers, the rank's wait is the time
    # to make a batch.
    needed_workers = math.ceil((started.workers or wait_share) / (1 - min(wait_share, 0.99)))
    workers = max(needed_workers, started.workers + 1)
    if started.cores and workers > started.cores:
        # A pipeline that was chosen automatically has a reason against the others.
        return f"all CPU cores in use: try {'' if started.pipeline_auto else 'data.pipeline=auto, '}{cheaper_images}"
    return f"try data.workers={workers}"


@dataclass(frozen=True)
class Straggler:
    """A rank that slows down the others: its timing in the latest epoch, and the median of the other ranks."""

    timing: RankEpochTiming
    median_of_others: RankEpochTiming


def _lasting_straggler(epochs: Sequence[EpochEvent]) -> Straggler | None:
    stragglers = [straggler for epoch in epochs if (straggler := find_straggler(epoch.rank_timings)) is not None]
    if len(stragglers) < len(epochs) or len({straggler.timing.rank for straggler in stragglers}) != 1:
        return None
    lost = sum(straggler.timing.local_seconds - straggler.median_of_others.local_seconds for straggler in stragglers)
    return stragglers[-1] if lost >= STRAGGLER_MIN_LOST_SECONDS else None


def find_straggler(timings: Sequence[RankEpochTiming]) -> Straggler | None:
    """Return the straggler of the same steps of all ranks; None if there is none."""
    if len(timings) < 2:
        return None
    slowest = max(timings, key=lambda timing: timing.local_seconds)
    others = [timing for timing in timings if timing is not slowest]
    waited = statistics.median(timing.data_wait_seconds for timing in others)
    forward = statistics.median(timing.forward_seconds for timing in others)
    median_seconds = statistics.median(timing.local_seconds for timing in others)
    lost_seconds = slowest.local_seconds - median_seconds
    if (
        slowest.local_seconds <= STRAGGLER_RATIO * median_seconds
        or lost_seconds <= STRAGGLER_WAIT_SHARE * slowest.seconds
        or forward == 0
        # If the other ranks wait for data too, the input pipeline is the bottleneck.
        or waited > MAX_DATA_WAIT_SHARE * slowest.seconds
    ):
        return None
    return Straggler(slowest, RankEpochTiming(-1, slowest.seconds, waited, forward))


def _straggler_bottleneck(
    started: RunStarted, straggler: Straggler, throttled: Mapping[str, GpuThrottling], now: float
) -> Bottleneck:
    mine, others = straggler.timing, straggler.median_of_others
    device = next((record.device for record in started.ranks if record.rank == mine.rank), "")
    if device in throttled:
        return _throttling_bottleneck(started, {device: throttled[device]}, now)
    name = f"rank {mine.rank} ({device[:SHORT_UUID_CHARS]})" if device else f"rank {mine.rank}"
    waits_longer = mine.data_wait_seconds - others.data_wait_seconds
    if waits_longer > mine.forward_seconds - others.forward_seconds:
        why = f"it waits for data {mine.data_wait_seconds / mine.seconds:.0%} of the time"
    else:
        why = f"its forward pass takes {mine.forward_seconds / others.forward_seconds:.1f}x the median"
    return Bottleneck(BottleneckKind.STRAGGLER, f"waiting for {name}: {why}")


def update_throttling(sample: GpuSample, sampled_at: float, previous: GpuThrottling | None) -> GpuThrottling | None:
    """Return the throttling of a GPU after one more sample; a sample without a clock reading changes nothing."""
    clock, max_clock = positive_or_none(sample.sm_clock), positive_or_none(sample.max_sm_clock)
    if sample.throttle is None or clock is None:
        return previous
    cause = next((cause for reason, cause in THROTTLE_CAUSES.items() if reason in sample.throttle), None)
    if cause is None or (max_clock is not None and clock >= MIN_FULL_CLOCK_SHARE * max_clock):
        return None
    return GpuThrottling(
        cause, previous.since if previous else sampled_at, previous.samples + 1 if previous else 1, clock
    )


def heat_bottleneck(
    started: RunStarted | None, throttling: Mapping[str, GpuThrottling], now: float
) -> Bottleneck | None:
    """Return that GPUs have been throttled by heat for `HEAT_MIN_SECONDS`, or None.

    `throttling` maps GPU UUIDs, `now` is in Unix seconds. Unlike `diagnose`, it does not wait for the end of an epoch.
    """
    hot = {
        uuid: state
        for uuid, state in throttling.items()
        if state.cause in HEAT_CAUSES
        and state.samples >= THROTTLE_MIN_SAMPLES
        and now - state.since >= HEAT_MIN_SECONDS
    }
    return _throttling_bottleneck(started, hot, now) if started is not None and hot else None


def _throttling_bottleneck(started: RunStarted, throttled: Mapping[str, GpuThrottling], now: float) -> Bottleneck:
    """Name the GPU that was throttled first, and the number of others."""
    uuid, earliest = min(throttled.items(), key=lambda item: item[1].since)
    rank = next((f" (rank {record.rank})" for record in started.ranks if record.device == uuid), "")
    more = f" and {len(throttled) - 1} more" if len(throttled) > 1 else ""
    day, today = (time.strftime("%Y-%m-%d ", time.localtime(clock)) for clock in (earliest.since, now))
    since = ("" if day == today else day) + time.strftime("%H:%M", time.localtime(earliest.since))
    message = (
        f"{uuid[:SHORT_UUID_CHARS]}{rank}{more} throttled by {earliest.cause} since {since}, now at "
        f"{earliest.clock_mhz:.0f} MHz"
    )
    return Bottleneck(BottleneckKind.THROTTLED, message)


# Readings whose mean is shown. Memory and temperature are shown with their maximum.
MEAN_READINGS = ("util", "sm_active", "tensor_active", "power")


@dataclass
class GpuStats:
    """Statistics of one GPU over all its samples: means, maxima, and the ongoing throttling."""

    totals: dict[str, list[float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    throttling: GpuThrottling | None = None

    def add(self, sample: GpuSample, time: float) -> None:
        """Add a sample taken at `time`, in Unix seconds."""
        for name in MEAN_READINGS:
            if (value := getattr(sample, name)) is not None:
                total = self.totals.setdefault(name, [0.0, 0.0])
                total[0] += value
                total[1] += 1
        for name in ("memory_used", "temperature"):
            if (value := getattr(sample, name)) is not None:
                self.maxima[name] = max(self.maxima.get(name, 0.0), value)
        self.throttling = update_throttling(sample, time, self.throttling)

    def mean(self, name: str) -> float | None:
        """Return the mean of a reading; None if the GPU never provided it."""
        total = self.totals.get(name)
        return None if total is None else round(total[0] / total[1], 1)
