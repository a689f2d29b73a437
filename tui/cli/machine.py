"""`gputrain gpus` and `gputrain doctor`: the GPUs of this host, and whether it is ready to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from engine.gpus.start_sampler import MIN_PERIOD_SECONDS
from tui.cli.arguments import (
    ConfigArguments,
    JsonOption,
    RunsDirOption,
    TrustCodeOption,
    exit_on_usage_error,
    resolve_arguments,
)
from tui.cli.help import MACHINE, ConfigCommand, HelpCommand, make_epilog
from tui.cli.train import build_request, raise_problems
from tui.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.doctor.check import Check

app = typer.Typer()

DOCTOR_FORMAT = 1


@app.command(
    cls=HelpCommand,
    rich_help_panel=MACHINE,
    epilog=make_epilog(
        [
            "gputrain gpus",
            "gputrain gpus --watch --processes",
            "gputrain gpus --json --links",
            "gputrain gpus --record gpus.jsonl --samples 60",
        ]
    ),
)
def gpus(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all readings as JSON; a null value comes with the reason.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until Ctrl-C or q; with --json, one line per sample.")
    ] = False,
    processes: Annotated[bool, typer.Option("--processes", help="List the processes on each GPU.")] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Measure PCIe throughput of GPUs older than Hopper; takes 40 ms per GPU.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=MIN_PERIOD_SECONDS, max=3600, help="Time between samples."),
    ] = 1.0,
    samples: Annotated[int | None, typer.Option("--samples", metavar="N", min=1, help="Stop after N samples.")] = None,
    record: Annotated[
        str | None,
        typer.Option("--record", metavar="FILE", help="Write samples to FILE; GPUTRAIN_NVML=replay:FILE replays them."),
    ] = None,
) -> None:
    """Show GPU utilization, memory, power, temperature and users."""
    from tui.cli.gpus import GpusOptions, show_gpus

    with exit_on_usage_error():
        show_gpus(
            GpusOptions(
                json=as_json,
                watch=watch,
                processes=processes,
                links=links,
                interval_s=interval,
                samples=samples,
                record=record,
            )
        )


@app.command(
    cls=ConfigCommand,
    rich_help_panel=MACHINE,
    epilog=make_epilog(
        ["gputrain doctor", "gputrain doctor flowers.yaml --gpus 0,1"],
        exit_codes={0: "no problem, warnings allowed", 1: "a problem of this host", 2: "a config that `run` refuses"},
    ),
)
def doctor(
    arguments: ConfigArguments = None,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Check this host for problems that affect training.

    Checks CPU cores, memory, disk, driver, GPUs and PyTorch. Then checks a run of CONFIG, and runs an all-reduce.
    """
    from engine.doctor.examine import examine

    with exit_on_usage_error():
        flags: dict[str, tuple[str, str | bool]] = (
            {} if gpus is None else {FLAG_TO_KEY["gpus"]: (f"--gpus {gpus}", gpus)}
        )
        request = build_request(
            lambda: resolve_arguments(arguments, flags, trust_code=trust_code),
            None,
            runs_dir,
            dry_run=True,
            trust_code=trust_code,
        )
        raise_problems(request)
        raise typer.Exit(show_checks(examine(request), as_json=as_json))


def show_checks(areas: Iterable[Sequence[Check]], *, as_json: bool) -> int:
    """Print all checks and return the exit code: 0 without problems, 2 if `gputrain run` refuses the config, else 1."""
    from tui.cli.console import table_console
    from tui.tables.doctor import area_lines, summary_line

    done: list[Check] = []
    if as_json:
        done = [check for area in areas for check in area]
        typer.echo(json.dumps({"format": DOCTOR_FORMAT, "checks": [check.to_dict() for check in done]}, indent=2))
    else:
        console = table_console()
        with console.status("checking") if sys.stdout.isatty() else nullcontext():
            for area in areas:
                done += area
                for line in area_lines(area, console.width):
                    console.print(line, soft_wrap=True)
        typer.echo(summary_line(done), err=True)
    if any(check.refuses_run for check in done):
        return 2
    return int(any(check.state == "problem" for check in done))
