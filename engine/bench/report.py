"""Results of a benchmark: the measurements of one run, read from its journal, and the scaling over all runs.

Called by `runner` and by the `gputrain bench` command.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.runs.bottleneck import model_flops_utilization, valid_share
from engine.runs.history import History

# The first epoch is excluded as warmup: caches fill, and cuDNN and torch.compile select algorithms.
MIN_EPOCHS = 2
# Share by which throughput may exceed its limit by chance, if the epochs do not vary more.
MIN_LIMIT_NOISE = 0.05


@dataclass(frozen=True)
class BenchRun:
    """Measurements of one run.

    `message` is the error of a failed run. `epochs` are pairs of duration in seconds, including evaluation, and
    training throughput in images/s over all ranks. `data_wait` (share of the training time that ranks wait for data)
    and `mfu` (model FLOPs utilization) are medians over all epochs except the first, None if unknown. `limit` marks a
    run with the fixed pipeline, which repeats one batch on the device.
    """

    ranks: int
    repeat: int
    message: str = ""
    global_batch: int | None = None
    startup_seconds: float | None = None
    epochs: tuple[tuple[float, float], ...] = ()
    data_wait: float | None = None
    mfu: float | None = None
    limit: bool = False

    @property
    def median_images_per_second(self) -> float:
        """Median throughput in images/s over all epochs except the first. Only for runs that did not fail."""
        return statistics.median(rate for _, rate in self.epochs[1:])

    def to_dict(self) -> dict[str, Any]:
        names = ("seconds", "images_per_second")
        values = asdict(self) | {"epochs": [dict(zip(names, epoch, strict=True)) for epoch in self.epochs]}
        return values | {"synthetic_data": values.pop("limit")}


@dataclass(frozen=True)
class ScalingResult:
    """Results of all runs with the same number of ranks. Unknown values are None.

    - `seconds_per_epoch`, `images_per_second`: medians over all epochs except the first of each run.
    - `spread`: (fastest - slowest epoch) / 2, relative to the median throughput.
    - `speed_up`: throughput relative to the smallest number of ranks, which counts as a speedup of its rank count.
    - `efficiency`: `speed_up` divided by the number of ranks.
    - `limit_images_per_second`: median throughput of the runs with the fixed pipeline.
    - `limit_share`: median ratio of each run's throughput to that of the paired run with the fixed pipeline. A ratio
      above 1 within the spread of the epochs counts as 1.
    - `limit_problem`: why `limit_share` is unknown although it was measured: a ratio above 1 beyond that spread.
    - `failures`: messages of the runs that failed.
    """

    ranks: int
    global_batch: int | None = None
    seconds_per_epoch: float | None = None
    images_per_second: float | None = None
    spread: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    first_epoch_seconds: float | None = None
    startup_seconds: float | None = None
    failures: list[str] = field(default_factory=list)
    data_wait: float | None = None
    mfu: float | None = None
    limit_images_per_second: float | None = None
    limit_share: float | None = None
    limit_problem: str = ""


def bench_run_from_history(history: History, ranks: int, repeat: int, launched_at: float) -> BenchRun:
    """Build the measurements of a run from its journal. `launched_at` is the start of its process in Unix seconds."""
    started = history.started
    # NaN is null in a journal.
    values: list[tuple[float | None, float | None]] = [
        (epoch.seconds, epoch.images_per_second) for epoch in history.epochs
    ]
    epochs = [(seconds, rate) for seconds, rate in values if seconds is not None and rate is not None]
    if started is None or len(epochs) < MIN_EPOCHS:
        return BenchRun(
            ranks, repeat, "too short to measure: needs 2 complete epochs, because the first is excluded as warmup"
        )
    measured_epochs = history.epochs[1:]
    return BenchRun(
        ranks=ranks,
        repeat=repeat,
        message="",
        global_batch=started.global_batch,
        startup_seconds=round(max(started.time - launched_at, 0.0), 3),
        epochs=tuple(epochs),
        data_wait=median_of_known([valid_share(epoch.data_wait) for epoch in measured_epochs]),
        mfu=median_of_known([model_flops_utilization(started, epoch) for epoch in measured_epochs]),
    )


def median_of_known(values: Sequence[float | None]) -> float | None:
    """Return the median of the values that are not None, or None."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


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
        rates = [rate for _, rate in measured_epochs]
        rate = statistics.median(rates)
        base = base or (rate, ranks)
        ratio = median_of_known(
            [run.median_images_per_second / limits[run.repeat] for run in successful if limits.get(run.repeat)]
        )
        limit_epochs = [epoch for run in same_ranks if not run.message and run.limit for epoch in run.epochs[1:]]
        spread = _spread(rates)
        noise = max(MIN_LIMIT_NOISE, spread or 0.0, _spread([rate for _, rate in limit_epochs]) or 0.0)
        limit_problem = "" if ratio is None or ratio <= 1 + noise else _limit_problem(ratio)
        # Without a run on one rank, linear scaling up to the smallest number of ranks is assumed.
        speed_up = rate / base[0] * base[1]
        results.append(
            ScalingResult(
                ranks=ranks,
                global_batch=successful[0].global_batch,
                seconds_per_epoch=statistics.median(seconds for seconds, _ in measured_epochs),
                images_per_second=rate,
                spread=spread,
                speed_up=speed_up,
                efficiency=speed_up / ranks,
                first_epoch_seconds=statistics.median(run.epochs[0][0] for run in successful),
                startup_seconds=statistics.median(run.startup_seconds or 0.0 for run in successful),
                failures=failures,
                data_wait=median_of_known([run.data_wait for run in successful]),
                mfu=median_of_known([run.mfu for run in successful]),
                limit_images_per_second=median_of_known(list(limits.values())),
                limit_share=None if ratio is None or limit_problem else min(ratio, 1.0),
                limit_problem=limit_problem,
            )
        )
    return results


def _spread(rates: Sequence[float]) -> float | None:
    """Return (fastest - slowest) / 2 relative to the median; None for fewer than two rates."""
    return (max(rates) - min(rates)) / 2 / statistics.median(rates) if len(rates) > 1 else None


def _limit_problem(ratio: float) -> str:
    return (
        f"training was {ratio:.2f} times as fast as without the input pipeline, which is impossible, so other load "
        "disturbed the measurement; repeat it on an idle host, with --repeats 3 or more epochs"
    )
