"""Output of `gputrain bench`: a row for each rank count, and a chart of the speedup. `tui.cli.bench` prints it."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from engine.runs.series import Series
from engine.utils.text import pluralize, printable
from tui.charts.plot import Curve, PlotWindow, plot
from tui.palette import ANSI, rich_theme, series_style
from tui.text.tables import UNKNOWN, format_table

if TYPE_CHECKING:
    from engine.bench.report import BenchRun, ScalingResult
    from engine.bench.runner import BenchPlan

HEADER = ("RANKS", "BATCH", "EPOCH", "IMAGES/S", "SPREAD", "SPEEDUP", "EFFICIENCY", "FIRST", "STARTUP")
LIMIT_HEADER = ("RANKS", "IMAGES/S", "LIMIT", "SHARE", "DATA WAIT", "MFU")
MAX_CHART_COLUMNS, CHART_LINES = 72, 14
MEASURED_STYLE, IDEAL_STYLE = series_style(1), series_style(8)
POINT_MARKER = "●"


def describe_bench_plan(plan: BenchPlan) -> str:
    """Describe what a bench will run, in one line."""
    data, scope = plan.config.data, "in total" if plan.strong else "per rank"
    *others, last = (str(count) for count in plan.rank_counts)
    ranks = f"{', '.join(others)} and {last} ranks" if others else pluralize(plan.rank_counts[0], "rank")
    device = "free GPUs" if plan.on_gpu else "the CPU"
    times = "" if plan.repeats == 1 else f", {plan.repeats} times, interleaved"
    limit = ", each also without the input pipeline" if plan.limit else ""
    return (
        f"{plan.config.model.name} on {data.dataset}, batch {data.batch_size} {scope}, "
        f"{pluralize(plan.epochs, 'epoch')}: {ranks} on {device}{times}{limit}"
    )


def describe_bench_run(run: BenchRun) -> str:
    """Describe the result of one run: seconds per epoch and images/s, or its failure."""
    name = pluralize(run.ranks, "rank") + (", without the input pipeline" if run.limit else "")
    if run.message:
        return printable(f"{name}: failed: {run.message}")
    seconds, rate = (statistics.median(values) for values in zip(*run.epochs[1:], strict=True))
    return f"{name}: {format_seconds(seconds)} per epoch, {rate:,.0f} images/s"


def bench_lines(speeds: Sequence[ScalingResult]) -> Iterator[str]:
    """Yield the scaling table, the limit table if measured, and failures."""
    rows = [
        (
            str(speed.ranks),
            format_optional(speed.global_batch, "{:,}"),
            UNKNOWN if speed.seconds_per_epoch is None else format_seconds(speed.seconds_per_epoch),
            format_optional(speed.images_per_second, "{:,.0f}"),
            format_optional(speed.spread, "±{:.0%}"),
            format_optional(speed.speed_up, "{:.2f}"),
            format_optional(speed.efficiency, "{:.0%}"),
            UNKNOWN if speed.first_epoch_seconds is None else format_seconds(speed.first_epoch_seconds),
            UNKNOWN if speed.startup_seconds is None else format_seconds(speed.startup_seconds),
        )
        for speed in speeds
    ]
    yield from format_table([HEADER, *rows], right_aligned=range(len(HEADER)))
    if any(speed.limit_images_per_second is not None for speed in speeds):
        yield from ["", *limit_lines(speeds)]
    measured = [speed.ranks for speed in speeds if speed.speed_up is not None]
    if measured and measured[0] > 1:
        yield f"1 rank was not measured; the speedup of {measured[0]} ranks is assumed to be {measured[0]}."
    for speed in speeds:
        if speed.limit_problem:
            yield f"{pluralize(speed.ranks, 'rank')}: the share is unknown: {speed.limit_problem}"
        for message in dict.fromkeys(speed.failures):
            yield printable(f"{pluralize(speed.ranks, 'rank')} failed: {message}")


def limit_lines(speeds: Sequence[ScalingResult]) -> Iterator[str]:
    """Return the table that compares throughput with the limit: the throughput without the input pipeline."""
    rows = [
        (
            str(speed.ranks),
            format_optional(speed.images_per_second, "{:,.0f}"),
            format_optional(speed.limit_images_per_second, "{:,.0f}"),
            format_optional(speed.limit_share, "{:.0%}"),
            format_optional(speed.data_wait, "{:.0%}"),
            format_optional(speed.mfu, "{:.0%}"),
        )
        for speed in speeds
    ]
    return format_table([LIMIT_HEADER, *rows], right_aligned=range(len(LIMIT_HEADER)))


def format_optional(value: float | None, template: str) -> str:
    return UNKNOWN if value is None else template.format(value)


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def chart_lines(speeds: Sequence[ScalingResult], width: int) -> list[Text]:
    """Plot the measured and the linear speedup over ranks; empty if fewer than two rank counts were measured."""
    points = [(speed.ranks, speed.speed_up) for speed in speeds if speed.speed_up is not None]
    if len(points) < 2:
        return []
    ranks, speedups = (np.asarray(values, np.float64) for values in zip(*points, strict=True))
    measured = Series(ranks, speedups)
    curves = [
        Curve("ideal", Series(ranks, ranks), "braille", IDEAL_STYLE),
        Curve("measured", measured, "braille", MEASURED_STYLE),
        Curve("measured", measured, POINT_MARKER, MEASURED_STYLE),
    ]
    drawn = plot(curves, PlotWindow(float(ranks[0]), float(ranks[-1])), min(width, MAX_CHART_COLUMNS), CHART_LINES)
    legend = Text.assemble(
        "Speedup by ranks   ", (f"{POINT_MARKER} measured", MEASURED_STYLE), "   ", ("⠒⠒ ideal", IDEAL_STYLE)
    )
    return [Text(""), legend, *drawn.lines]


def print_chart(speeds: Sequence[ScalingResult]) -> None:
    """Print the speedup chart to stdout."""
    console = Console(highlight=False, soft_wrap=True, theme=rich_theme(ANSI))
    for line in chart_lines(speeds, console.width if sys.stdout.isatty() else MAX_CHART_COLUMNS):
        console.print(line)
