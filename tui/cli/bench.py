"""`gputrain bench`: how training speeds up with the number of ranks."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tui.cli.arguments import (
    ConfigArguments,
    ConfigCommand,
    JsonOption,
    exit_on_usage_error,
    flag_overrides,
    resolve_arguments,
    split_arguments,
)

app = typer.Typer()

BENCH_FORMAT = 1
DEFAULT_EPOCHS = 3


@app.command(cls=ConfigCommand, epilog="Example: gputrain bench flowers.yaml --ranks-list 1,2,4 --repeats 3")
def bench(
    arguments: ConfigArguments = None,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    counts: Annotated[
        str | None,
        typer.Option("--ranks-list", help="Numbers of ranks to measure [default: 1, 2, 4, … and all GPUs or cores]"),
    ] = None,
    epochs_each: Annotated[
        int | None, typer.Option("--epochs", help="Epochs of each run, of which the first does not count [default: 3]")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each number of ranks, in turn.")] = 1,
    strong: Annotated[
        bool, typer.Option("--strong", help="Divide the batch size among the ranks, and not the same for each.")
    ] = False,
    limit: Annotated[
        bool, typer.Option("--limit", help="Beside each run, in turn, one whose data is on the device already.")
    ] = False,
    batch_size: Annotated[str | None, typer.Option("--batch-size")] = None,
    amp: Annotated[str | None, typer.Option("--amp")] = None,
    workers: Annotated[str | None, typer.Option("--workers")] = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train the same work on 1, 2, 4 … GPUs, or CPU ranks, and say how much faster it gets.

    The work is CONFIG, or the preset digits. Each is a run of its own in a folder that is taken away again, and takes
    only GPUs that are free. Speed-up is images a second by those of the fewest ranks; efficiency is it by the number of
    ranks. With --limit each run has one beside it that is given one batch again and again: so fast it could be if no
    data had to come. Exit codes: 0 all measured, 1 a run failed, 2 bad usage or config.
    """
    from engine.bench.report import BenchRun, scaling_results
    from engine.bench.runner import plan_bench, run_bench
    from tui.launcher import gputrain_command
    from tui.text.bench import bench_lines, describe_bench_plan, describe_bench_run, print_chart

    given = {
        "gpus": gpus, "batch_size": batch_size, "amp": amp, "workers": workers, "model": model, "dataset": dataset,
        "data_path": data_path, "epochs": None if epochs_each is None else str(epochs_each),
    }  # fmt: skip
    with exit_on_usage_error():
        flags = flag_overrides(given)
        file, overrides = split_arguments(arguments)
        resolved = resolve_arguments([file or "digits", *overrides], flags)
        # What a config is to be trained for is more than it takes to measure it.
        epochs = resolved.config.run.epochs if "run.epochs" in resolved.typed else DEFAULT_EPOCHS
        plan = plan_bench(resolved.config, parse_rank_counts(counts), epochs, repeats, strong=strong, limit=limit)
    typer.echo(describe_bench_plan(plan), err=True)
    runs: list[BenchRun] = []
    total = len(plan.rank_counts) * plan.repeats * (2 if plan.limit else 1)
    interrupted = False
    try:
        for run in run_bench(plan, gputrain_command()):
            runs.append(run)
            typer.echo(f"{len(runs)}/{total}  {describe_bench_run(run)}", err=True)
    except KeyboardInterrupt:
        interrupted = True
        typer.echo(f"asked to stop after {len(runs)} of {total} runs; nothing of them is left", err=True)
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
            "speeds": [speed.to_dict() for speed in speeds],
            "runs": [run.to_dict() for run in runs],
        }
        typer.echo(json.dumps(values, indent=2))
    elif runs:
        for line in bench_lines(speeds):
            typer.echo(line)
        print_chart(speeds)
    raise typer.Exit(1 if interrupted or any(run.message for run in runs) else 0)


def parse_rank_counts(text: str | None) -> list[int]:
    """Of `1,2,4`. Raises UsageError."""
    from engine.utils.errors import UsageError

    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError.one("--ranks-list", f"{text!r} is no list of numbers; give them as 1,2,4")
    return [int(part) for part in parts]
