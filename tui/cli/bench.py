"""`gputrain bench`: measure how training throughput scales with the number of ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tui.cli.arguments import (
    ConfigArguments,
    JsonOption,
    TrustCodeOption,
    code_trust,
    exit_on_usage_error,
    flag_overrides,
    print_no_effect,
    print_warning,
    resolve_arguments,
    split_arguments,
)
from tui.cli.help import TRAIN, ConfigCommand, make_epilog

if TYPE_CHECKING:
    from engine.bench.report import BenchRun, ScalingResult
    from engine.bench.runner import BenchPlan

app = typer.Typer()

BENCH_FORMAT = 1
DEFAULT_EPOCHS = 3


@app.command(
    cls=ConfigCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(
        [
            "gputrain bench",
            "gputrain bench flowers.yaml --ranks-list 1,2,4 --repeats 3",
            "gputrain bench flowers.yaml --strong --limit",
        ],
        exit_codes={0: "success", 1: "a run failed or was interrupted", 2: "usage or config error"},
    ),
)
def bench(
    arguments: ConfigArguments = None,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    counts: Annotated[
        str | None,
        typer.Option(
            "--ranks-list", metavar="COUNTS", help="Rank counts to measure [default: 1, 2, 4, … all GPUs or cores]"
        ),
    ] = None,
    epochs_each: Annotated[
        int | None, typer.Option("--epochs", metavar="N", help="Epochs per run; the first is not counted [default: 3]")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=1, help="Runs per rank count, interleaved.")
    ] = 1,
    strong: Annotated[
        bool, typer.Option("--strong", help="Strong scaling: keep the global batch size constant.")
    ] = False,
    limit: Annotated[
        bool, typer.Option("--limit", help="Also measure each rank count without the input pipeline.")
    ] = False,
    batch_size: Annotated[str | None, typer.Option("--batch-size")] = None,
    amp: Annotated[str | None, typer.Option("--amp")] = None,
    workers: Annotated[str | None, typer.Option("--workers")] = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Measure how training scales with the number of GPUs or CPU ranks.

    Trains CONFIG (default: the preset digits) on 1, 2, 4, … free GPUs. Each run uses a temporary folder.

    Speedup is the throughput relative to one rank; efficiency is speedup / ranks. --limit adds runs that repeat one
    batch on the device: their throughput is the limit for any input pipeline.
    """
    from engine.bench.report import scaling_results
    from engine.bench.runner import plan_bench, run_bench
    from engine.launch.gpu_usage import waiting_emitter
    from engine.runs.event_lines import event_line
    from tui.launcher import gputrain_command
    from tui.tables.bench import bench_lines

    flag_values = {
        "gpus": gpus, "batch_size": batch_size, "amp": amp, "workers": workers, "model": model, "dataset": dataset,
        "data_path": data_path, "epochs": None if epochs_each is None else str(epochs_each),
    }  # fmt: skip
    with exit_on_usage_error():
        flags = flag_overrides(flag_values)
        file, overrides = split_arguments(arguments)
        resolved = resolve_arguments([file or "digits", *overrides], flags, trust_code=trust_code)
        print_no_effect(resolved)
        code_trust(resolved, granted=trust_code).check(resolved.config)
        # A config trains for more epochs than a measurement needs.
        epochs = resolved.config.run.epochs if "run.epochs" in resolved.typed else DEFAULT_EPOCHS
        rank_counts, on_wait = (
            parse_rank_counts(counts),
            waiting_emitter(lambda event: typer.echo(event_line(event), err=True)),
        )
        plan = plan_bench(resolved.config, rank_counts, epochs, repeats, strong=strong, limit=limit, on_wait=on_wait)
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
        values = {
            "format": BENCH_FORMAT,
            "model": plan.config.model.name,
            "dataset": plan.config.data.dataset,
            "device": "gpu" if plan.on_gpu else "cpu",
            "scaling": "strong" if plan.strong else "weak",
            "epochs": plan.epochs,
            "repeats": plan.repeats,
            "limit": plan.limit,
            "speeds": [asdict(speed) for speed in speeds],
            "runs": [run.to_dict() for run in runs],
        }
        typer.echo(json.dumps(values, indent=2))
    elif runs:
        for line in bench_lines(speeds):
            typer.echo(line)
        print_chart(speeds)
    raise typer.Exit(1 if interrupted or any(run.message for run in runs) else 0)


def parse_rank_counts(text: str | None) -> list[int]:
    """Parse `1,2,4`. Raises UsageError if a part is not a number."""
    from engine.utils.errors import UsageError

    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError.one(
            "--ranks-list", f"{text!r} is not a list of numbers; write rank counts as 1,2,4", code="invalid-value"
        )
    return [int(part) for part in parts]


def describe_bench_plan(plan: BenchPlan) -> str:
    """Describe what a bench will run, in one line."""
    from engine.utils.text import pluralize

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
    import statistics

    from engine.utils.text import pluralize, printable
    from engine.utils.units import format_rate
    from tui.tables.bench import format_seconds

    name = pluralize(run.ranks, "rank") + (", without the input pipeline" if run.limit else "")
    if run.message:
        return printable(f"{name}: failed: {run.message}")
    seconds, rate = (statistics.median(values) for values in zip(*run.epochs[1:], strict=True))
    return f"{name}: {format_seconds(seconds)} per epoch, {format_rate(rate)} images/s"


def print_chart(speeds: Sequence[ScalingResult]) -> None:
    """Print the speedup chart to stdout."""
    from tui.cli.console import table_console
    from tui.tables.bench import MAX_CHART_COLUMNS, chart_lines

    console = table_console()
    for line in chart_lines(speeds, console.width if sys.stdout.isatty() else MAX_CHART_COLUMNS):
        console.print(line, soft_wrap=True)
