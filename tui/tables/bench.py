"""The tables of `gputrain bench`, a row for each rank count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine.runs.metrics import METRICS
from engine.show.table import Align, Column, plain_lines
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_count, format_rate, format_share

if TYPE_CHECKING:
    from engine.bench.report import BenchRun, ScalingResult
    from engine.bench.runner import BenchPlan


def _column(
    key: str, title: str, value: Callable[[ScalingResult], float | None], text: Callable[[float], str]
) -> Column[ScalingResult]:
    """Return a column of values that may be unknown."""

    def cell(speed: ScalingResult) -> str:
        return UNKNOWN if (known := value(speed)) is None else text(known)

    return Column(key, title, cell, Align.RIGHT)


def format_seconds(seconds: float) -> str:
    """Format a measured duration with the digits that people compare."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


RANKS = _column("ranks", METRICS["ranks"].label, lambda speed: speed.ranks, format_count)
RATE = _column("images_per_second", "images/s", lambda speed: speed.images_per_second, format_rate)
COLUMNS = (
    RANKS,
    _column("global_batch", "batch", lambda speed: speed.global_batch, format_count),
    _column("seconds_per_epoch", "epoch", lambda speed: speed.seconds_per_epoch, format_seconds),
    RATE,
    _column("speed_up", "speedup", lambda speed: speed.speed_up, lambda ratio: f"{ratio:.2f}"),
    _column("efficiency", "efficiency", lambda speed: speed.efficiency, format_share),
)
# Compares the throughput with the limit: the throughput without the input pipeline.
LIMIT_COLUMNS = (
    RANKS,
    RATE,
    _column("limit_images_per_second", "limit", lambda speed: speed.limit_images_per_second, format_rate),
    _column("limit_share", "share", lambda speed: speed.limit_share, format_share),
)


def bench_lines(speeds: Sequence[ScalingResult]) -> Iterator[str]:
    """Yield the scaling table, the limit table if measured, and failures."""
    yield from plain_lines(COLUMNS, speeds)
    if any(speed.limit_images_per_second is not None for speed in speeds):
        yield from ["", *plain_lines(LIMIT_COLUMNS, speeds)]
    measured = [speed.ranks for speed in speeds if speed.speed_up is not None]
    if measured and measured[0] > 1:
        yield f"1 rank was not measured; the speedup of {measured[0]} ranks is assumed to be {measured[0]}."
    for speed in speeds:
        for message in dict.fromkeys(speed.failures):
            yield printable(f"{pluralize(speed.ranks, 'rank')} failed: {message}")


def describe_bench_plan(plan: BenchPlan) -> str:
    """Describe what a bench will run, in one line."""
    data = plan.config.data
    *others, last = (str(count) for count in plan.rank_counts)
    ranks = f"{', '.join(others)} and {last} ranks" if others else pluralize(plan.rank_counts[0], "rank")
    device = "free GPUs" if plan.on_gpu else "the CPU"
    times = "" if plan.repeats == 1 else f", {plan.repeats} times, interleaved"
    limit = ", each also without the input pipeline" if plan.limit else ""
    return (
        f"{plan.config.model.name} on {data.dataset}, batch {data.batch_size} per rank, "
        f"{pluralize(plan.epochs, 'epoch')}: {ranks} on {device}{times}{limit}"
    )


def describe_bench_run(run: BenchRun) -> str:
    """Describe the result of one run: seconds per epoch and images/s, or its failure."""

    name = pluralize(run.ranks, "rank") + (", without the input pipeline" if run.limit else "")
    if run.message:
        return printable(f"{name}: failed: {run.message}")
    seconds, rate = (statistics.median(values) for values in zip(*run.epochs[1:], strict=True))
    return f"{name}: {format_seconds(seconds)} per epoch, {format_rate(rate)} images/s"
