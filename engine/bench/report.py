"""Results of a benchmark: the measurements of one run, read from its journal, and the scaling over all runs.

Called by `runner` and by the `gputrain bench` command.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.runs.history import History

# The first epoch is excluded as warmup: caches fill, and cuDNN and torch.compile select algorithms.
MIN_EPOCHS = 2


@dataclass(frozen=True)
class BenchRun:
    """Measurements of one run.

    `message` is the error of a failed run. `epochs` are pairs of duration in seconds, including evaluation, and
    training throughput in images/s over all ranks. `limit` marks a run with the fixed pipeline, which repeats one batch
    on the device.
    """

    ranks: int
    repeat: int
    message: str = ""
    global_batch: int | None = None
    epochs: tuple[tuple[float, float], ...] = ()
    limit: bool = False

    @property
    def median_images_per_second(self) -> float:
        """Median throughput in images/s over all epochs except the first. Only for runs that did not fail."""
        return statistics.median(rate for _, rate in self.epochs[1:])

    def to_dict(self) -> dict[str, Any]:
        """Return the run for JSON."""
        names = ("seconds", "images_per_second")
        values = asdict(self) | {"epochs": [dict(zip(names, epoch, strict=True)) for epoch in self.epochs]}
        return values | {"synthetic_data": values.pop("limit")}


@dataclass(frozen=True)
class ScalingResult:
    """Results of all runs with the same number of ranks. Unknown values are None.

    - `seconds_per_epoch`, `images_per_second`: medians over all epochs except the first of each run.
    - `speed_up`: throughput relative to the smallest number of ranks, which counts as a speedup of its rank count.
    - `efficiency`: `speed_up` divided by the number of ranks.
    - `limit_images_per_second`: median throughput of the runs with the fixed pipeline.
    - `limit_share`: median ratio of each run's throughput to that of the paired run with the fixed pipeline.
    - `failures`: messages of the runs that failed.
    """

    ranks: int
    global_batch: int | None = None
    seconds_per_epoch: float | None = None
    images_per_second: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    failures: list[str] = field(default_factory=list)
    limit_images_per_second: float | None = None
    limit_share: float | None = None


def bench_run_from_history(history: History, ranks: int, repeat: int) -> BenchRun:
    """Build the measurements of a run from its journal."""
    # NaN is null in a journal.
    values: list[tuple[float | None, float | None]] = [
        (epoch.seconds, epoch.images_per_second) for epoch in history.epochs
    ]
    epochs = [(seconds, rate) for seconds, rate in values if seconds is not None and rate is not None]
    if history.started is None or len(epochs) < MIN_EPOCHS:
        return BenchRun(
            ranks, repeat, "too short to measure: needs 2 complete epochs, because the first is excluded as warmup"
        )
    return BenchRun(ranks, repeat, "", history.started.global_batch, tuple(epochs))


def scaling_results(runs: Sequence[BenchRun]) -> list[ScalingResult]:
    """Aggregate runs by number of ranks, in ascending order."""
    results: list[ScalingResult] = []
    base: tuple[float, int] | None = None
    for ranks in sorted({run.ranks for run in runs}):
        same_ranks = [run for run in runs if run.ranks == ranks]
        failures = [f"{'on a fixed batch: ' if run.limit else ''}{run.message}" for run in same_ranks if run.message]
        successful = [run for run in same_ranks if not run.message and not run.limit]
        limits = {run.repeat: run.median_images_per_second for run in same_ranks if not run.message and run.limit}
        if not successful:
            results.append(ScalingResult(ranks, failures=failures))
            continue
        measured_epochs = [epoch for run in successful for epoch in run.epochs[1:]]
        rate = statistics.median(rate for _, rate in measured_epochs)
        base = base or (rate, ranks)
        ratios = [run.median_images_per_second / limits[run.repeat] for run in successful if limits.get(run.repeat)]
        # Without a run on one rank, linear scaling up to the smallest number of ranks is assumed.
        speed_up = rate / base[0] * base[1]
        results.append(
            ScalingResult(
                ranks=ranks,
                global_batch=successful[0].global_batch,
                seconds_per_epoch=statistics.median(seconds for seconds, _ in measured_epochs),
                images_per_second=rate,
                speed_up=speed_up,
                efficiency=speed_up / ranks,
                failures=failures,
                limit_images_per_second=statistics.median(limits.values()) if limits else None,
                limit_share=statistics.median(ratios) if ratios else None,
            )
        )
    return results
