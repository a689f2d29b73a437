"""`gputrain gpus` and `gputrain doctor`: the GPUs of this host, and whether it is ready to train."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from engine.base.errors import UsageError
from engine.base.text import pluralize, printable
from engine.base.units import format_bytes
from engine.gpus.start_sampler import MIN_PERIOD_SECONDS
from engine.jobs.doctor.check import Check
from engine.jobs.doctor.leftovers import Leftover, find_leftovers, remove_leftovers
from engine.report.table import Align, Column
from engine.runs.root import runs_root
from tui.cli.command import command
from tui.cli.config_arguments import ConfigArguments, resolve_arguments
from tui.cli.console import ask, print_json, print_lines, print_table, table_console
from tui.cli.gpus import show_gpus
from tui.cli.options import HostsOption, JsonOption, RunsDirOption, TrustCodeOption, YesOption, count_option

DEFAULT_SECONDS = 1.0


@command(
    [
        "gputrain gpus",
        "gputrain gpus --watch --processes",
        "gputrain gpus --record gpus.jsonl -n 60",
        "gputrain gpus --hosts lab1,lab2",
    ],
    "With --json, --watch prints one line per sample. GPUTRAIN_NVML=replay:FILE replays the samples of --record.",
)
def gpus(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the reason of each null.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    processes: Annotated[bool, typer.Option("--processes", help="List the processes on each GPU.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=MIN_PERIOD_SECONDS, max=3600, help="Time between samples."),
    ] = DEFAULT_SECONDS,
    count: Annotated[int | None, count_option("samples")] = None,
    record: Annotated[
        str | None,
        typer.Option("--record", metavar="FILE", help="Write samples to FILE."),
    ] = None,
    hosts: HostsOption = None,
) -> None:
    """Show GPU utilization, memory, power, temperature and users."""
    if hosts is not None:
        from tui.cli.hosts import show_host_gpus

        refused = {"--count": count, "--record": record, "--interval": interval != DEFAULT_SECONDS}
        if option := next((option for option, is_set in refused.items() if is_set), None):
            raise UsageError.one("--hosts", f"cannot be combined with {option}", code="conflict")
        show_host_gpus(hosts, as_json=as_json, watch=watch, processes=processes)
        return

    show_gpus(as_json=as_json, watch=watch, processes=processes, interval_s=interval, count=count, record=record)


@command(
    [
        "gputrain doctor",
        "gputrain doctor --send-test-message",
        "gputrain doctor notify.urls=env:NTFY --send-test-message",
    ],
    "Messages about runs, by ntfy, Slack, mail, Telegram and others: a run sends them when it finished, failed, "
    "crashed, stalls, has a throttled GPU, or got the GPUs that it waited for (notify.when). A URL contains secrets, "
    "so a config only refers to one: env:NAME or file:PATH, a file of mode 0600 with one URL per line. Services and "
    "their URLs: https://appriseit.com/services/",
    "\b\nTo set messages up:\n"
    "  pip install '.[notify]'                    the library that sends messages\n"
    "  export NTFY=ntfy://MY-SECRET-TOPIC         put a URL into a variable\n"
    "  gputrain run digits notify.urls=env:NTFY   use it for one run\n"
    "  chmod 600 ~/.config/gputrain/notify        a file of URLs for all runs",
    exit_codes={
        0: "no problem, warnings allowed, or sent to each destination",
        1: "a problem of this host, or not sent to one of them",
        2: "usage or config error",
    },
)
def doctor(
    *,
    arguments: ConfigArguments = None,
    send_test_message: Annotated[
        bool,
        typer.Option(
            "--send-test-message", help="Only send a message to each destination of CONFIG and of your own file."
        ),
    ] = False,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Check this host for problems that affect training.

    Checks CPU cores, memory, disk, driver, GPUs and PyTorch. gputrain run CONFIG --dry-run checks a config and trains
    a batch on its ranks.
    """
    from engine.jobs.doctor.examine import examine

    refuse_urls(arguments or [])
    if send_test_message:
        config = resolve_arguments(arguments, trust_code=trust_code).config
        raise typer.Exit(send_test(config.notify.urls, as_json=as_json))
    if arguments:
        advice = f"check a config with: gputrain run {shlex.join(arguments)} --dry-run"
        raise UsageError.one(arguments[0], "has an effect only with --send-test-message", advice, code="conflict")
    raise typer.Exit(show_checks(examine(runs_root(runs_dir)), as_json=as_json))


def show_checks(areas: Iterable[Sequence[Check]], *, as_json: bool) -> int:
    """Print all checks and return the exit code: 0 without problems, else 1."""
    from tui.screens.tables.doctor import area_lines, summary_line

    done: list[Check] = []
    if as_json:
        done = [check for area in areas for check in area]
        print_json({"checks": [check.to_dict() for check in done]})
    else:
        console = table_console()
        with console.status("checking") if sys.stdout.isatty() else nullcontext():
            for area in areas:
                done += area
                print_lines(console, area_lines(area, console.width))
        typer.echo(summary_line(done), err=True)
    return int(any(check.state == "problem" for check in done))


def refuse_urls(arguments: list[str]) -> None:
    """Raise UsageError, without the URL, if an argument is one instead of a config."""
    from engine.config.notify_section import REFERENCE_ADVICE, URLS_KEY

    if any("://" in argument.partition("=")[0] for argument in arguments):
        raise UsageError.one(
            "CONFIG", f"is a URL; set {URLS_KEY}=env:NAME instead", REFERENCE_ADVICE, code="invalid-value"
        )


def send_test(urls: Sequence[str], *, as_json: bool) -> int:
    """Send the test message, print a line per destination without its URL, and return the exit code.

    Raises UsageError if there is no destination.
    """

    from engine.jobs.notify.message import test_message
    from engine.jobs.notify.sender import send_message, user_file

    deliveries = send_message(test_message(socket.gethostname()), urls)
    if not deliveries:
        advice = f"set notify.urls=env:NAME, or write URLs into {user_file()} (chmod 600)"
        raise UsageError.one("notify.urls", "there is no destination", advice, code="missing-value")
    if as_json:
        print_json({"deliveries": [asdict(delivery) for delivery in deliveries]})
    else:
        for delivery in deliveries:
            typer.echo(printable(delivery.line), err=not delivery.sent)
    return 0 if all(delivery.sent for delivery in deliveries) else 1


@command(["gputrain clean", "gputrain clean --yes"])
def clean(*, yes: YesOption = False, as_json: JsonOption = False) -> None:
    """Delete caches and what dead runs left, after a question.

    Caches are made again when they are needed: decoded images, lists of models, compiled code. Runs, trained
    models, settings and presets stay. With --json, it only lists.
    """
    found = find_leftovers()
    if as_json:
        print_json({"leftovers": found})
        return
    if not found:
        typer.echo("There is nothing to delete.", err=True)
        return
    columns: list[Column[Leftover]] = [
        Column("place", "place", lambda row: row.place),
        Column("files", "files", lambda row: f"{row.files:,}", Align.RIGHT),
        Column("size", "size", lambda row: format_bytes(row.size_bytes), Align.RIGHT),
    ]
    print_table(columns, found)
    count = pluralize(sum(row.files for row in found), "file")
    size = format_bytes(sum(row.size_bytes for row in found))
    ask(f"Delete {count}, {size}", (), "gputrain clean", yes=yes)
    try:
        remove_leftovers()
    except OSError as error:
        reason = f"cannot be deleted: {error.strerror}"
        raise UsageError.one(str(error.filename), reason, code="not-writable") from error
    typer.echo(f"Deleted {count}, {size}.", err=True)
