"""`gputrain bench`: measure how training throughput scales with the number of ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from engine.bench.report import BenchRun, ScalingResult, scaling_results
from engine.launch.gpu_usage import waiting_emitter
from engine.runs.event_lines import event_line
from engine.runs.metrics import METRICS
from engine.show.table import Align, Column, plain_lines
from engine.utils.errors import UsageError
from engine.utils.text import pluralize, printable
from engine.utils.units import UNKNOWN, format_count, format_rate, format_share
from tui.cli.command import command
from tui.cli.config_arguments import (
    ConfigArguments,
    FlagOverrides,
    code_trust,
    config_flags,
    print_no_effect,
    resolve_arguments,
    split_arguments,
)
from tui.cli.console import print_json, print_warning
from tui.cli.options import JsonOption, TrustCodeOption
from tui.launcher import gputrain_command

if TYPE_CHECKING:
    from engine.bench.runner import BenchPlan


DEFAULT_EPOCHS = 3


@command(
    [
        "gputrain bench",
        "gputrain bench flowers.yaml --ranks-list 1,2,4 --repeats 3",
        "gputrain bench flowers.yaml --synthetic-data",
    ],
    exit_codes={0: "success", 1: "a run failed or was interrupted", 2: "usage or config error"},
)
@config_flags()
def bench(
    *,
    arguments: ConfigArguments = None,
    counts: Annotated[
        str | None,
        typer.Option("--ranks-list", metavar="COUNTS", help="Rank counts to measure [default: 1, 2, 4, …]"),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Runs per rank count, interleaved.")
    ] = 1,
    synthetic_data: Annotated[
        bool, typer.Option("--synthetic-data", help="Also measure without the input pipeline.")
    ] = False,
    flags: FlagOverrides,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Measure how training scales with the number of GPUs or CPU ranks.

    Trains CONFIG (default: the preset digits) on 1, 2, 4, … free GPUs, or CPU cores, in temporary folders.

    Each run trains for 3 epochs unless --epochs sets another number; the first is not counted.

    Speedup is the throughput relative to one rank; efficiency is speedup / ranks. --synthetic-data adds runs that
    repeat one batch on the device: their throughput is the limit for any input pipeline.
    """
    from engine.bench.runner import UNUSED_KEYS, plan_bench, run_bench

    file, overrides = split_arguments(arguments)
    resolved = resolve_arguments([file or "digits", *overrides], flags, trust_code=trust_code, unused=UNUSED_KEYS)
    print_no_effect(resolved)
    code_trust(resolved, granted=trust_code).check(resolved.config)
    # A config trains for more epochs than a measurement needs.
    epochs = resolved.config.run.epochs if "run.epochs" in resolved.typed else DEFAULT_EPOCHS
    plan = plan_bench(
        resolved.config,
        parse_rank_counts(counts),
        epochs,
        repeats,
        limit=synthetic_data,
        on_wait=waiting_emitter(lambda event: typer.echo(event_line(event), err=True)),
    )
    typer.echo(describe_bench_plan(plan), err=True)
    if plan.cpu_fallback is not None:
        print_warning(plan.cpu_fallback)
    runs: list[BenchRun] = []
    total = len(plan.rank_counts) * plan.repeats * (2 if plan.limit else 1)
    interrupted = False
    try:
        for run in run_bench(plan, gputrain_command(), ["--trust-code"] if trust_code else []):
            runs.append(run)
            typer.echo(f"{len(runs)}/{total}  {describe_bench_run(run)}", err=True)
    except KeyboardInterrupt:
        interrupted = True
        typer.echo(f"interrupted after {len(runs)} of {total} runs; their folders are deleted", err=True)
    speeds = scaling_results(runs)
    if as_json:
        print_json(
            {
                "model": plan.config.model.name,
                "dataset": plan.config.data.dataset,
                "device": "gpu" if plan.on_gpu else "cpu",
                "epochs": plan.epochs,
                "repeats": plan.repeats,
                "synthetic_data": plan.limit,
                "speeds": [asdict(speed) for speed in speeds],
                "runs": [run.to_dict() for run in runs],
            }
        )
    elif runs:
        for line in bench_lines(speeds):
            typer.echo(line)
    raise typer.Exit(1 if interrupted or any(run.message for run in runs) else 0)


def parse_rank_counts(text: str | None) -> list[int]:
    """Parse `1,2,4`. Raises UsageError if a part is not a number."""
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError.one(
            "--ranks-list", f"{text!r} is not a list of numbers; write rank counts as 1,2,4", code="invalid-value"
        )
    return [int(part) for part in parts]


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
