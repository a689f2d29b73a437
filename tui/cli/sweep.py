"""`gputrain sweep`: search values of config keys or of the arguments of a script, and list, show and stop searches."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.libraries import check_training
from engine.base.text import printable
from engine.base.wait import wait_until
from engine.jobs.sweeps import MAX_PARALLEL, MAX_SEED, MAX_TRIALS, Pruner, Sampler
from engine.jobs.sweeps import folder as sweep_folders
from engine.jobs.sweeps.folder import SweepFolder, find_sweep, is_sweep_folder
from engine.runs.batch.job import cancel_job
from engine.runs.control import send_request
from engine.runs.metrics import Better
from engine.runs.root import runs_root
from tui.cli.command import command, takes
from tui.cli.completions import complete_config, complete_sweeps
from tui.cli.config_arguments import FlagOverrides, config_flags, split_arguments, trust_option
from tui.cli.console import print_json, print_table, print_warning
from tui.cli.options import (
    DetachOption,
    JsonOption,
    RunsDirOption,
    TrustCodeOption,
    TrustOwnerOption,
    dry_run_option,
)
from tui.cli.resume_command import stored_command
from tui.cli.run_command import (
    CommandOptions,
    WordsCommand,
    check_keys,
    check_no_options,
    command_stem,
    make_command,
    takes_words,
)
from tui.cli.train import PlaceOptions
from tui.form.flags import FLAG_TO_KEY

# The batch system that runs arrays of jobs.
ARRAY_SYSTEM = "slurm"
# A trial is a job of one node.
PLACE_OPTIONS = ("on", "partition", "slurm")
# Five name, continue or queue one run, and --seed was the seed of the sampler.
OTHER_FLAGS = ("name", "resume", "queue", "after", "begin", "seed")
EXIT_CODES = {
    0: "all trials have ended",
    1: "no trial has a result",
    2: "usage or config error",
    3: "stopped; continue with gputrain sweep resume NAME",
}
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        help="Sweep name, sweep folder, or last [default: last]",
        autocompletion=complete_sweeps,
    ),
]


TrialsOption = Annotated[
    int | None,
    typer.Option(
        "--trials",
        metavar="N",
        min=1,
        max=MAX_TRIALS,
        help="Number of trials [default: 40 or the whole grid, or as before].",
    ),
]
ParallelOption = Annotated[
    int | None,
    typer.Option("--parallel", metavar="N", min=1, max=MAX_PARALLEL, help="Trials at once [default: 1, or as before]."),
]


@command(
    [
        "gputrain sweep flowers.yaml optim.lr=log:1e-3..0.3 optim.name=sgd,adamw",
        "gputrain sweep digits model.name=linear,cnn --sampler grid --pruner none",
        "gputrain sweep digits optim.lr=log:1e-3..0.3 optim.weight_decay=0,5e-4",
        "gputrain sweep flowers.yaml optim.lr=log:1e-3..0.3 --parallel 4 --detach",
        "gputrain sweep digits optim.lr=log:1e-3..0.3 --on slurm --ngpu 1",
        "gputrain sweep --maximize val/acc lr=log:1e-4..0.1 -- ./train.py --lr {lr}",
        "gputrain sweep --minimize loss --gpus 0,1 --parallel 2 n=8,16 -- ./fit {n}",
    ],
    "Trial 0 is CONFIG itself. Each trial is a run: NAME-000, NAME-001, and so on. The same command again continues a "
    "sweep. Ctrl-C stops the trials with a checkpoint; a second Ctrl-C kills them.",
    "With a command, each KEY is a placeholder {KEY} in its words, and METRIC is what its output or metric files call "
    "it, as in gputrain runs. Else METRIC is one of the epochs, or metrics.NAME for your own. Listed GPUs are divided "
    "among parallel trials.",
    "median stops a trial that is worse than the median of the finished ones at the same epoch, once five have "
    "finished and after 1/3 of the epochs, or of the steps of the first command that ends. asha stops the trials "
    "outside the best third after 1/9 and 1/3.",
    exit_codes=EXIT_CODES,
    kind=WordsCommand,
)
@config_flags(*(flag for flag in FLAG_TO_KEY if flag not in OTHER_FLAGS))
@takes("options", CommandOptions, only=("cwd", "env", "stop_signal", "metrics", "parse", "on_resume"))
@takes("place", PlaceOptions, only=PLACE_OPTIONS)
@takes_words
def run(
    *,
    words: Sequence[str] | None,
    options: CommandOptions,
    place: PlaceOptions,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=SPACE]...",
            help="YAML file or preset.\nLOW..HIGH, log:LOW..HIGH, int:LOW..HIGH, choices (sgd,adamw) or a fixed value.",
            autocompletion=complete_config,
        ),
    ] = None,
    trials: TrialsOption = None,
    parallel: ParallelOption = None,
    maximize: Annotated[
        str | None,
        typer.Option(
            "--maximize",
            metavar="METRIC",
            help="Metric to maximize, such as val/acc [default: that of run.monitor].",
        ),
    ] = None,
    minimize: Annotated[
        str | None,
        typer.Option("--minimize", metavar="METRIC", help="Metric to minimize, such as best_val_loss."),
    ] = None,
    sampler: Annotated[
        Sampler | None, typer.Option("--sampler", help="How the values are chosen [default: tpe].")
    ] = None,
    pruner: Annotated[
        Pruner | None,
        typer.Option(
            "--pruner",
            help="How poor trials are stopped early [default: median].",
        ),
    ] = None,
    sampler_seed: Annotated[
        int | None,
        typer.Option("--sampler-seed", metavar="N", min=0, max=MAX_SEED, help="Seed of the sampler, not of the runs."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the sweep [default: CONFIG-sweep].")
    ] = None,
    detach: DetachOption = False,
    dry_run: Annotated[bool, dry_run_option(" with its first command; start nothing.")] = False,
    flags: FlagOverrides,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Search the best values of config keys or script arguments.

    Optuna chooses the values of each KEY; an option has the same value in all trials. `gputrain sweep show` lists the
    trials and the command that trains the best one longer.

    Each trial waits for its GPUs: --gpus is free:1, or cpu, unless it is set. With --on slurm, an array of jobs runs
    the trials, --parallel of them at once. A trial that reaches --time-limit continues in its requeued job.
    """
    from engine.jobs.sweeps.plan import plan_script, plan_sweep
    from engine.jobs.sweeps.start import choose_folder, create_sweep, dry_run_lines
    from engine.jobs.sweeps.study import require_optuna

    typed = {"trials": trials, "parallel": parallel, "sampler": sampler, "pruner": pruner, "seed": sampler_seed}
    given: dict[str, Any] = {key: value for key, value in typed.items() if value is not None}
    problems, root = list[Problem](), runs_root(runs_dir)
    with collect_problems(problems):
        given |= metric_setting(maximize, minimize, is_script=words is not None)
    file, overrides = split_arguments(arguments)
    from engine.jobs.sweeps.settings import typed_settings

    engine = _batch_system(place)
    settings = typed_settings(file, overrides, {key: str(value) for key, (_, value) in flags.items()}, given, words)
    require_optuna()
    trust = trust_option(granted=trust_code)
    # The problems of a line are in one message.
    with collect_problems(problems):
        if words is None:
            check_no_options(options, "gputrain sweep … -- COMMAND")
            plan = plan_sweep(settings, root, trust=trust, engine=engine)
            stem = Path(settings.config).stem if settings.config else "default"
        else:
            check_keys(flags, flags)
            plan = plan_script(settings, make_command(words, options), root, trust=trust, engine=engine)
            stem = command_stem(words)
    raise_if_any(problems)
    folder = choose_folder(root, name, plan, stem)
    if dry_run:
        typer.echo("\n".join(map(printable, dry_run_lines(folder, plan))))
        return
    if is_sweep_folder(folder.path):
        folder.require_own(trust_owner=False)
    else:
        create_sweep(folder, plan)
    _control(folder, given, place, detach=detach, trust_owner=trust_owner, trust_code=trust_code)


def _batch_system(place: PlaceOptions) -> str:
    """Return the batch system that runs the trials; "" for this host. Raises UsageError."""
    if place.on not in (None, ARRAY_SYSTEM):
        reason = f"{printable(str(place.on))} cannot run a sweep; it starts here or with --on {ARRAY_SYSTEM}"
        raise UsageError.one("--on", reason, code="not-supported")
    if place.on is None and place != PlaceOptions(slurm=place.slurm or None):
        raise UsageError.one("--partition, --slurm", "name the place with --on", code="missing-value")
    return place.on or ""


def metric_setting(maximize: str | None, minimize: str | None, *, is_script: bool) -> dict[str, str]:
    """Return the setting `metric` of the two options, or that of `run.monitor`. Raises UsageError."""
    from engine.jobs.sweeps.settings import MONITORED, typed_metric

    if maximize is not None and minimize is not None:
        raise UsageError.one("--maximize", "cannot be combined with --minimize; keep one", code="conflict")
    for option, metric, better in (("--maximize", maximize, Better.HIGH), ("--minimize", minimize, Better.LOW)):
        if metric is not None:
            return {"metric": typed_metric(option, metric, better, is_script=is_script)}
    if is_script:
        advice = "add --maximize METRIC or --minimize METRIC, such as --maximize val/acc"
        raise UsageError.one("metric", "is missing: a script has no metric of its own", advice, code="missing-value")
    return {"metric": MONITORED}


@command(["gputrain sweep list", "gputrain sweep list --json"])
def list_sweeps(
    *, runs_dir: RunsDirOption = None, trust_owner: TrustOwnerOption = False, as_json: JsonOption = False
) -> None:
    """List sweeps, the latest result first.

    TRIALS is the number of trials that have ended, and of those planned. AGE is the time since the start.
    """
    from engine.jobs.sweeps.status import SweepReader
    from engine.jobs.sweeps.study import require_optuna
    from tui.screens.tables.sweeps import sweep_columns

    require_optuna()
    root, rows, problems = runs_root(runs_dir), [], list[Problem]()
    for folder in sweep_folders.list_sweeps(root):
        with collect_problems(problems):
            folder.require_own(trust_owner=trust_owner)
            rows.append(SweepReader(folder).poll())
    for problem in problems:
        print_warning(problem)
    if as_json:
        print_json({"sweeps": [row.summary() for row in rows]})
    elif rows:
        print_table(sweep_columns(time.time()), rows)
    elif not problems:
        typer.echo(f"There are no sweeps in {root}. Start one with `gputrain sweep CONFIG KEY=SPACE`.", err=True)


@command(["gputrain sweep show", "gputrain sweep show flowers-sweep --json"])
def show(
    *,
    name: NameArgument = "last",
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the trials of a sweep."""
    from engine.jobs.sweeps.status import SweepReader
    from tui.screens.tables.sweeps import sweep_lines

    status = SweepReader(find_sweep(runs_root(runs_dir), name, trust_owner=trust_owner)).poll()
    if as_json:
        print_json(status.to_dict())
    else:
        typer.echo("\n".join(sweep_lines(status)))


@command(["gputrain sweep stop", "gputrain sweep stop flowers-sweep"])
def stop(*, name: NameArgument = "last", runs_dir: RunsDirOption = None, trust_owner: TrustOwnerOption = False) -> None:
    """Stop a sweep and its trials.

    Waits until it has stopped. `gputrain sweep resume NAME` continues it.
    """
    folder = find_sweep(runs_root(runs_dir), name, trust_owner=trust_owner)
    if (cancelled := cancel_job(folder)) is not None:
        typer.echo(f"{folder.name} {cancelled}.", err=True)
        return
    if not folder.is_owned():
        typer.echo(f"{folder.name} is not running.", err=True)
        return
    send_request(folder.control, "stop")
    typer.echo(f"Waiting for {folder.name} and its trials to stop.", err=True)
    wait_until(lambda: not folder.is_owned(), math.inf)
    typer.echo(f"{folder.name} has stopped.", err=True)


@command(["gputrain sweep resume", "gputrain sweep resume flowers-sweep --trials 80 --detach"], exit_codes=EXIT_CODES)
@takes("place", PlaceOptions, only=PLACE_OPTIONS)
def resume(
    *,
    place: PlaceOptions,
    name: NameArgument = "last",
    trials: TrialsOption = None,
    parallel: ParallelOption = None,
    detach: DetachOption = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Continue a sweep with its settings.

    Only the number of trials and of those at the same time may change.
    """
    given = {key: value for key, value in {"trials": trials, "parallel": parallel}.items() if value is not None}
    folder = find_sweep(runs_root(runs_dir), name, trust_owner=trust_owner)
    _control(folder, given, place, detach=detach, trust_owner=trust_owner, trust_code=trust_code)


def _control(
    folder: SweepFolder,
    given: dict[str, Any],
    place: PlaceOptions,
    *,
    detach: bool,
    trust_owner: bool,
    trust_code: bool,
) -> None:
    """Run the controller, here or in the background, and exit with its code; or submit jobs. Raises UsageError."""
    from engine.jobs.launch.submission import JobOptions
    from engine.jobs.sweeps.start import detach_sweep, load_sweep, run_sweep, submit_sweep
    from tui.screens.launcher import gputrain_command

    command = None
    from engine.jobs.sweeps.settings import read_settings

    if read_settings(folder.settings).command:
        command = stored_command(folder, trust_code=trust_code)
    else:
        check_training("gputrain sweep resume")
    numbers = {key: value for key, value in given.items() if key in ("trials", "parallel")}
    flags = [*(["--trust-code"] if trust_code else []), *(["--trust-owner"] if trust_owner else [])]
    if engine := _batch_system(place):
        plan = load_sweep(folder, numbers, trust_code=trust_code, command=command)
        options = JobOptions(partition=place.partition, options=place.slurm or ())
        typer.echo(submit_sweep(folder, plan, engine, options, flags), err=True)
        typer.echo(folder.name)
        return
    if detach:
        flags += [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
        if (warning := detach_sweep(folder, gputrain_command(), flags)) is not None:
            print_warning(warning)
        typer.echo(folder.name)
        typer.echo(f"Watch it with `gputrain sweep show {folder.name}`.", err=True)
        return
    plan = load_sweep(folder, numbers, trust_code=trust_code, command=command)
    # Of the script of a job.
    task = os.environ.pop("GPUTRAIN_TASK", "")
    # The time limit is that of the job.
    flags += ["queue.time_limit=0"] * bool(task)
    code = run_sweep(folder, plan, command=gputrain_command(), flags=flags, emit=_print_line, task=task)
    raise typer.Exit(code)


def _print_line(line: str) -> None:
    """Print progress; a terminal that is gone must not end the sweep."""
    with suppress(OSError):
        typer.echo(printable(line), err=True)
