"""The `gputrain` command line: data goes to stdout, messages to stderr.

Each command imports what it needs when it runs, so that `--help` and completion load neither torch nor pydantic.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.gpus.snapshot import MIN_PERIOD_SECONDS
from tui.cli.arguments import (
    ConfigArguments,
    ConfigCommand,
    JsonOption,
    LowBandwidthOption,
    RunArgument,
    RunsDirOption,
    exit_on_usage_error,
    flag_overrides,
    resolve_arguments,
    split_arguments,
)
from tui.cli.bench import app as bench_app
from tui.cli.models import app as models_app
from tui.cli.trained import app as trained_app
from tui.flags import FLAG_TO_KEY

if TYPE_CHECKING:
    from engine.config.loader import ResolvedConfig

app = typer.Typer(
    name="gputrain",
    help="Train PyTorch models on multiple GPUs from a terminal. Runs continue when you disconnect.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: gputrain run --headless digits   (a preset that needs no download)",
)


app.add_typer(models_app)
app.add_typer(bench_app)
app.add_typer(trained_app)


def print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"gputrain {version('gputrain')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def gputrain(show_version: VersionOption = False) -> None:
    """Train PyTorch models on multiple GPUs from a terminal. Runs continue when you disconnect."""


@app.command(
    cls=ConfigCommand,
    epilog="Example: gputrain run --headless digits --epochs 5 optim.lr=0.1. All keys: gputrain config --describe",
)
def run(
    arguments: ConfigArguments = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Run without a screen; print progress to stderr.")
    ] = False,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    ngpu: Annotated[
        int | None, typer.Option("--ngpu", min=0, help="Shorthand for --gpus free:N; 0 means --gpus cpu.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait")] = False,
    ranks: Annotated[str | None, typer.Option("--ranks")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs")] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size")] = None,
    lr: Annotated[str | None, typer.Option("--lr")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer")] = None,
    scheduler: Annotated[str | None, typer.Option("--scheduler")] = None,
    amp: Annotated[str | None, typer.Option("--amp")] = None,
    workers: Annotated[str | None, typer.Option("--workers")] = None,
    model: Annotated[str | None, typer.Option("--model")] = None,
    dataset: Annotated[str | None, typer.Option("--dataset")] = None,
    data_path: Annotated[str | None, typer.Option("--data-path")] = None,
    seed: Annotated[str | None, typer.Option("--seed")] = None,
    name: Annotated[str | None, typer.Option("--name")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher")] = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    runs_dir: RunsDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines; implies --headless.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan and train one batch per rank; keep no files."),
    ] = False,
) -> None:
    """Train a model.

    On a terminal, the screen shows the run; quitting the screen does not stop it. Without a terminal, or with
    --headless, --json or --dry-run, the run stays in the foreground: Ctrl-C saves a checkpoint and stops at the next
    step, a second Ctrl-C kills the run.

    Exit codes without a screen: 0 finished, 1 failed, 2 usage or config error, 3 stopped and ready to resume.
    """
    from engine.utils.errors import UsageError

    given = {
        "gpus": gpus, "ranks": ranks, "epochs": epochs, "batch_size": batch_size, "lr": lr, "optimizer": optimizer,
        "scheduler": scheduler, "amp": amp, "workers": workers, "model": model, "dataset": dataset,
        "data_path": data_path, "seed": seed, "name": name, "launcher": launcher,
    }  # fmt: skip
    with exit_on_usage_error():
        flags = flag_overrides(given)
        for key, switched in (("resume", resume), ("wait", wait)):
            if switched:
                flags[FLAG_TO_KEY[key]] = (f"--{key}", True)
        if ngpu is not None:
            chosen = f"free:{ngpu}" if ngpu else "cpu"
            if gpus is not None and gpus != chosen:
                raise UsageError.one("--ngpu", f"means --gpus {chosen}, but --gpus {gpus} is given too; keep one")
            flags[FLAG_TO_KEY["gpus"]] = (f"--ngpu {ngpu}", chosen)
        file, _ = split_arguments(arguments)
        try:
            resolved = resolve_arguments(arguments, flags)
        except UsageError as error:
            from engine.launch.preflight import with_all_problems

            raise with_all_problems(error) from error
        if should_open_screen(headless=headless or as_json or dry_run):
            run_with_screen(sys.argv[1:], runs_dir)
        else:
            run_headless(resolved, Path(file).stem if file else None, runs_dir, as_json=as_json, dry_run=dry_run)


def should_open_screen(*, headless: bool) -> bool:
    """Return whether to open the screen: on a terminal, unless torchrun or srun started this process as a rank."""
    from engine.distributed.rank_env import detect_launcher

    return (
        not headless and sys.stdin.isatty() and sys.stdout.isatty() and detect_launcher("auto", os.environ) == "spawn"
    )


def run_with_screen(arguments: list[str], runs_dir: str | None) -> None:
    """Start the same command headless in its own session, then open the screen on it. Raises UsageError."""
    from engine.runs.folder import runs_root
    from tui.cli.open_tui import open_screen
    from tui.launcher import launch_run

    # Insert the flag right after the command name: after a `--` it would be an argument.
    open_screen(launched_run=launch_run([arguments[0], "--headless", *arguments[1:]], runs_root(runs_dir)))


def run_headless(
    resolved: ResolvedConfig, default_name: str | None, runs_dir: str | None, *, as_json: bool, dry_run: bool = False
) -> None:
    """Train in the foreground and exit with the exit code of the run. Raises UsageError."""
    from engine.launch.launcher import launch
    from engine.launch.lifecycle import RunRequest
    from engine.runs.folder import runs_root, sanitize_run_name
    from tui.cli.progress import BackgroundPrinter, make_printer

    config = resolved.config
    default_name = sanitize_run_name(default_name or f"{config.data.dataset}-{config.model.name}")
    order = RunRequest(config, runs_root(runs_dir), default_name, dry_run)
    hear = BackgroundPrinter(make_printer(json=as_json, dry_run=dry_run))
    try:
        code = launch(order, hear)
    finally:
        hear.close()
    # A regular exit takes a second with torch loaded and blocks on a pipe whose reader has stopped reading.
    os._exit(code)


@app.command(epilog="Example: gputrain config digits optim.lr=0.2 --diff")
def config(
    arguments: ConfigArguments = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print only keys that differ from their defaults.")] = False,
    sources: Annotated[bool, typer.Option("--sources", help="Print where each value comes from.")] = False,
    described: Annotated[bool, typer.Option("--describe", help="Describe every key, its choices and default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved config."""
    if described:
        print_config_keys(as_json=as_json)
        return
    from engine.config.schema import as_dict
    from engine.config.yaml_io import to_yaml

    with exit_on_usage_error():
        resolved = resolve_arguments(arguments)
    values = as_dict(resolved.config, only_changed=diff)
    if not sources:
        typer.echo(json.dumps(values, indent=2) if as_json else to_yaml(values).rstrip())
        return
    rows = {
        f"{section}.{key}": {"value": value, "source": resolved.sources[f"{section}.{key}"]}
        for section, keys in values.items()
        for key, value in keys.items()
    }
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for key, row in rows.items():
        setting = f"{key} = {json.dumps(row['value'])}"
        typer.echo(f"{setting:<48}  {row['source']}")


def print_config_keys(*, as_json: bool) -> None:
    from engine.config.schema import fields
    from tui.flags import format_value
    from tui.form.model import field_kind

    rows = {
        key: {"description": info.description, "choices": list(field_kind(info.annotation)[0]), "default": info.default}
        for key, info in fields()
    }
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for key, row in rows.items():
        choices = f" One of {', '.join(row['choices'])}." if row["choices"] else ""
        default = format_value(row["default"])
        default = f" [default: {default}]" if default not in ("", "[]") else ""
        typer.echo(f"{key}\n    {row['description']}{choices}{default}")


@app.command()
def runs(runs_dir: RunsDirOption = None, as_json: JsonOption = False) -> None:
    """List runs, newest first."""
    from engine.runs.folder import list_runs, runs_root
    from engine.runs.watcher import RunWatcher
    from tui.text.runs import format_runs_table, make_run_row

    with exit_on_usage_error():
        root = runs_root(runs_dir)
        rows = [make_run_row(RunWatcher(folder)) for folder in list_runs(root)]
    if as_json:
        typer.echo(json.dumps({"format": 1, "runs": [row.to_dict() for row in rows]}, indent=2))
    elif not rows:
        typer.echo(f"There are no runs in {root}. Start one: gputrain run --headless digits", err=True)
    else:
        typer.echo(format_runs_table(rows))


@app.command(epilog="Example: gputrain gpus --watch --processes")
def gpus(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all readings as JSON; a null value comes with the reason.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Refresh until Ctrl-C or q; with --json, one line per sample.")
    ] = False,
    processes: Annotated[bool, typer.Option("--processes", help="List the processes on each GPU.")] = False,
    links: Annotated[
        bool, typer.Option("--links", help="Measure PCIe throughput, shown by --json; takes 40 ms per GPU.")
    ] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=MIN_PERIOD_SECONDS, max=3600, help="Seconds between samples.")
    ] = 1.0,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Stop after N samples.")] = None,
    record: Annotated[
        str | None,
        typer.Option("--record", help="Write samples to FILE; GPUTRAIN_NVML=replay:FILE replays them."),
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


@app.command(cls=ConfigCommand, epilog="Example: gputrain doctor flowers.yaml --gpus 0,1")
def doctor(
    arguments: ConfigArguments = None,
    gpus: Annotated[str | None, typer.Option("--gpus")] = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this host for problems that affect training.

    Checks CPU cores, memory, disk, driver, GPUs and PyTorch, then the needs of CONFIG, with an all-reduce between its
    ranks.

    Exit codes: 0 no problem, 1 at least one problem, 2 usage or config error.
    """
    from engine.doctor.examine import examine
    from engine.runs.folder import runs_root
    from tui.text.doctor import show_checks

    with exit_on_usage_error():
        flags: dict[str, tuple[str, str | bool]] = (
            {} if gpus is None else {FLAG_TO_KEY["gpus"]: (f"--gpus {gpus}", gpus)}
        )
        checks = examine(resolve_arguments(arguments, flags).config, runs_root(runs_dir))
        raise typer.Exit(0 if show_checks(checks, as_json=as_json) else 1)


@app.command()
def stop(
    run: RunArgument,
    runs_dir: RunsDirOption = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return without waiting for the run to stop.")] = False,
) -> None:
    """Stop a run at its next step and save a checkpoint.

    Waits until the run has stopped.
    """
    import time

    from engine.runs.control import send_request
    from engine.runs.folder import find_run, runs_root
    from engine.runs.watcher import RunWatcher

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run)
    watch = RunWatcher(folder)
    state = folder.state(watch.poll())
    if not state.live:
        typer.echo(f"{folder.name} is not running: {state}.", err=True)
        return
    with exit_on_usage_error():
        send_request(folder.control, "stop")
    while not no_wait and state.live:
        time.sleep(0.2)
        state = folder.state(watch.poll())
    typer.echo(f"Stop requested for {folder.name}." if no_wait else f"{folder.name} is {state}.", err=True)


@app.command()
def resume(
    run: RunArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config changes, such as run.epochs=30.")
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Run without a screen; print progress to stderr.")
    ] = False,
    runs_dir: RunsDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines; implies --headless.")] = False,
) -> None:
    """Resume a run from its last checkpoint.

    The run keeps the config it was started with, except for the changes given here.
    """
    from engine.config.loader import resolve_config
    from engine.runs.folder import find_run, runs_root
    from engine.utils.errors import UsageError

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run)
        if not folder.config.exists():
            raise UsageError.one(folder.name, "has no config.yaml to resume with; start a new run")
        if any("=" not in change for change in changes or []):
            raise UsageError.one(" ".join(changes or []), "give values as section.key=value")
        flags: dict[str, tuple[str, str | bool]] = {
            "run.resume": ("gputrain resume", True),
            "run.name": ("gputrain resume", folder.name),
        }
        resolved = resolve_config(str(folder.config), changes or [], flags)
        if should_open_screen(headless=headless or as_json):
            run_with_screen(sys.argv[1:], str(folder.path.parent))
        else:
            run_headless(resolved, None, str(folder.path.parent), as_json=as_json)


@app.command()
def attach(
    run: RunArgument = "last", runs_dir: RunsDirOption = None, low_bandwidth: LowBandwidthOption = False
) -> None:
    """Open the screen of a live or finished run.

    Quitting the screen does not stop the run.
    """
    from tui.cli.open_tui import open_screen

    with exit_on_usage_error():
        open_screen(runs_dir, run=run, low_bandwidth=low_bandwidth)


def open_tui(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Open the screen of this run.")] = None,
    runs_dir: RunsDirOption = None,
    low_bandwidth: LowBandwidthOption = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Explore a simulated server with eight GPUs and two runs.")
    ] = False,
) -> None:
    """Monitor GPUs, start runs and watch them train. Press ? for help, q to quit; runs continue."""
    from tui.cli.open_tui import open_demo, open_screen

    with exit_on_usage_error():
        if demo:
            open_demo(low_bandwidth)
        else:
            open_screen(runs_dir, run=run, low_bandwidth=low_bandwidth)


screen_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
screen_app.command(context_settings={"help_option_names": ["-h", "--help"]})(open_tui)


@app.command()
def logs(
    run: RunArgument,
    runs_dir: RunsDirOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends or Ctrl-C.")
    ] = False,
) -> None:
    """Print the log of a run: messages of the supervisor and output of the ranks."""
    import time

    from engine.runs.folder import find_run, runs_root
    from engine.runs.watcher import RunWatcher

    with exit_on_usage_error():
        folder = find_run(runs_root(runs_dir), run)
    watch = RunWatcher(folder)
    if not folder.log.exists():
        typer.echo(f"{folder.name} has no log yet.", err=True)
        return
    with folder.log.open(encoding="utf-8", errors="replace") as file:
        while True:
            live = follow and folder.state(watch.poll()).live
            for line in file:
                sys.stdout.write(line)
            sys.stdout.flush()
            if not live:
                return
            time.sleep(0.3)
