"""`gputrain bench`: measure how training throughput scales with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from engine.base.errors import UsageError
from engine.base.text import pluralize, printable
from engine.base.units import UNKNOWN, format_count, format_rate, format_share
from engine.jobs.launch.gpu_usage import waiting_emitter
from engine.report.table import Align, Column, plain_lines
from engine.runs.event_lines import event_line
from engine.runs.metrics import METRICS
from engine.train.bench.report import Speed, with_speed_ups
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
from tui.screens.launcher import gputrain_command

if TYPE_CHECKING:
    from engine.train.bench.runner import BenchPlan


DEFAULT_EPOCHS = 3


@command(
    [
        "gputrain bench",
        "gputrain bench flowers.yaml --ranks-list 1,2,4",
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
    flags: FlagOverrides,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Measure how training scales with the number of GPUs or CPU ranks.

    Trains CONFIG (default: the preset digits) on 1, 2, 4, … free GPUs, or CPU cores, in temporary folders.

    Each run trains for 3 epochs unless --epochs sets another number; the first is not counted.

    Speedup is the throughput relative to one rank; efficiency is speedup / ranks.
    """
    from engine.train.bench.runner import UNUSED_KEYS, plan_bench, run_bench

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
        on_wait=waiting_emitter(lambda event: typer.echo(event_line(event), err=True)),
    )
    typer.echo(describe_bench_plan(plan), err=True)
    if plan.cpu_fallback is not None:
        print_warning(plan.cpu_fallback)
    runs: list[Speed] = []
    total = len(plan.rank_counts)
    interrupted = False
    try:
        for run in run_bench(plan, gputrain_command(), ["--trust-code"] if trust_code else []):
            runs.append(run)
            typer.echo(f"{len(runs)}/{total}  {describe_bench_run(run)}", err=True)
    except KeyboardInterrupt:
        interrupted = True
        typer.echo(f"interrupted after {len(runs)} of {total} runs; their folders are deleted", err=True)
    speeds = with_speed_ups(runs)
    if as_json:
        print_json(
            {
                "model": plan.config.model.name,
                "dataset": plan.config.data.dataset,
                "device": "gpu" if plan.gpus else "cpu",
                "epochs": plan.epochs,
                "speeds": [asdict(speed) for speed in speeds],
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
    key: str, title: str, value: Callable[[Speed], float | None], text: Callable[[float], str]
) -> Column[Speed]:
    """Return a column of values that may be unknown."""

    def cell(speed: Speed) -> str:
        return UNKNOWN if (known := value(speed)) is None else text(known)

    return Column(key, title, cell, Align.RIGHT)


def format_seconds(seconds: float) -> str:
    """Format a measured duration with the digits that people compare."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


COLUMNS = (
    _column("ranks", METRICS["ranks"].label, lambda speed: speed.ranks, format_count),
    _column("global_batch", "batch", lambda speed: speed.global_batch, format_count),
    _column("seconds_per_epoch", "epoch", lambda speed: speed.seconds_per_epoch, format_seconds),
    _column("images_per_second", "images/s", lambda speed: speed.images_per_second, format_rate),
    _column("speed_up", "speedup", lambda speed: speed.speed_up, lambda ratio: f"{ratio:.2f}"),
    _column("efficiency", "efficiency", lambda speed: speed.efficiency, format_share),
)


def bench_lines(speeds: Sequence[Speed]) -> Iterator[str]:
    """Yield the scaling table, and failures."""
    yield from plain_lines(COLUMNS, speeds)
    measured = [speed.ranks for speed in speeds if speed.speed_up is not None]
    if measured and measured[0] > 1:
        yield f"1 rank was not measured; the speedup of {measured[0]} ranks is assumed to be {measured[0]}."
    for speed in speeds:
        if speed.message:
            yield printable(f"{pluralize(speed.ranks, 'rank')} failed: {speed.message}")


def describe_bench_plan(plan: BenchPlan) -> str:
    """Describe what a bench will run, in one line."""
    data = plan.config.data
    *others, last = (str(count) for count in plan.rank_counts)
    ranks = f"{', '.join(others)} and {last} ranks" if others else pluralize(plan.rank_counts[0], "rank")
    device = "free GPUs" if plan.gpus else "the CPU"
    return (
        f"{plan.config.model.name} on {data.dataset}, batch {data.batch_size} per rank, "
        f"{pluralize(plan.epochs, 'epoch')}: {ranks} on {device}"
    )


def describe_bench_run(run: Speed) -> str:
    """Describe the result of one run: seconds per epoch and images/s, or its failure."""
    name = pluralize(run.ranks, "rank")
    if run.seconds_per_epoch is None or run.images_per_second is None:
        return printable(f"{name}: failed: {run.message}")
    return f"{name}: {format_seconds(run.seconds_per_epoch)} per epoch, {format_rate(run.images_per_second)} images/s"
