"""`gputrain sweep`: search the values of config keys, continue a search, show and stop it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.arguments import (
    JsonOption,
    RunsDirOption,
    TrustCodeOption,
    TrustOwnerOption,
    exit_on_usage_error,
    print_warning,
    split_arguments,
    trust_option,
)
from tui.cli.help import TRAIN, HelpCommand, make_epilog

if TYPE_CHECKING:
    from engine.sweeps.folder import SweepFolder
    from engine.sweeps.settings import SweepSettings

app = typer.Typer()
# First words that stand for something else than a config.
SHOW, STOP = "show", "stop"
DETACH_TIMEOUT_SECONDS = 20.0


@app.command(
    cls=HelpCommand,
    rich_help_panel=TRAIN,
    epilog=make_epilog(
        [
            "gputrain sweep flowers.yaml optim.lr=log:1e-3..0.3 optim.name=sgd,adamw",
            "gputrain sweep digits model.name=linear,cnn --sampler grid --pruner none",
            "gputrain sweep sweep.yaml --parallel 4 --detach",
            "gputrain sweep show flowers-sweep",
            "gputrain sweep stop flowers-sweep",
            "gputrain sweep --resume flowers-sweep --trials 80",
        ],
        "Trial 0 is CONFIG itself. Each trial is a run of its own, NAME-000, NAME-001, and so on. The same command "
        "again continues a sweep. Ctrl-C stops the trials with a checkpoint; a second Ctrl-C kills them.",
        "sweep.yaml: config, space (KEY: SPACE), and optionally trials, parallel, sampler, pruner, metric, seed, name, "
        "gpus.",
        exit_codes={
            0: "all trials have ended",
            1: "no trial has a result",
            2: "usage or config error",
            3: "stopped; continue with gputrain sweep --resume NAME",
        },
    ),
)
def sweep(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=SPACE]...",
            help="YAML file, preset, or YAML file of a sweep.\n"
            "LOW..HIGH, log:LOW..HIGH, int:LOW..HIGH, choices such as sgd,adamw, or a fixed value.",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Number of trials [default: 40, or the whole grid].")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option("--parallel", metavar="N", help="Trials at the same time [default: 1].")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", metavar="NAME", help="tpe, grid or random [default: tpe].")
    ] = None,
    pruner: Annotated[
        str | None,
        typer.Option(
            "--pruner",
            metavar="NAME",
            help="asha stops trials outside the best third after 1/9 or 1/3 of the epochs; none [default: asha].",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Metric of the epochs, such as best_val_loss, metrics.NAME or metrics.NAME=low "
            "[default: best_val_accuracy].",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seed of the sampler; that of the runs is run.seed.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the sweep [default: CONFIG-sweep]."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="GPUS", help="GPUs of each trial, which waits for them [default: free:1 or cpu]."
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="NAME", help="Continue this sweep, or last, with its settings.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Continue in the background and print the name.")] = False,
    runs_dir: RunsDirOption = None,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search the best values of config keys with Optuna.

    `gputrain sweep show NAME` lists the trials, `gputrain sweep stop NAME` stops a sweep.
    """
    words = list(arguments or [])
    typed = {
        "trials": trials, "parallel": parallel, "sampler": sampler, "pruner": pruner, "metric": metric, "seed": seed,
    }  # fmt: skip
    given = {key: value for key, value in typed.items() if value is not None}
    with exit_on_usage_error():
        from engine.runs.folder import runs_root

        root = runs_root(runs_dir)
        if words[:1] in ([SHOW], [STOP]):
            folder = _find(root, words, trust_owner=trust_owner)
            if words[0] == SHOW:
                _show(folder, as_json=as_json)
            else:
                _stop(folder)
            return
        flags = [*(["--trust-code"] if trust_code else []), *(["--trust-owner"] if trust_owner else [])]
        if resume is not None:
            folder = _prepare_resume(root, resume, words, given, name, gpus, trust_owner=trust_owner)
        else:
            settings, file_name = _settings(words, given, gpus, trust_owner=trust_owner)
            folder = _prepare(root, name or file_name, settings, trust_code=trust_code)
        if detach:
            _detach(folder, [*flags, *_number_flags(given)])
            return
        code = _run(folder, given, flags, trust_code=trust_code)
    raise typer.Exit(code)


def _settings(
    words: list[str], given: dict[str, Any], gpus: str | None, *, trust_owner: bool
) -> tuple[SweepSettings, str | None]:
    """Return the settings that CONFIG, KEY=SPACE and the flags describe, and the name in a sweep file, if any."""
    from dataclasses import replace

    from engine.sweeps.settings import MAX_TRIALS, SweepSettings, is_sweep_file, read_sweep_file, split_space
    from engine.utils.files import expand_user, is_file

    file, overrides = split_arguments(words)
    space, fixed = split_space((key.strip(), value) for key, _, value in (text.partition("=") for text in overrides))
    if gpus is not None:
        fixed["device.gpus"] = gpus
    settings, name = SweepSettings(), None
    path = expand_user(file) if file is not None else None
    if path is not None and is_sweep_file(path):
        settings, name = read_sweep_file(path, trust_owner=trust_owner)
        # A key of the command line replaces that of the file, searched or fixed.
        typed = {*space, *fixed}
        space = {key: text for key, text in settings.space.items() if key not in typed} | space
        fixed = {key: text for key, text in settings.fixed.items() if key not in typed} | fixed
    elif path is not None:
        settings = replace(settings, config=str(path.absolute()) if is_file(path) else file)
    is_grid = given.get("sampler", settings.sampler) == "grid"
    if is_grid and "trials" not in given and settings.trials == SweepSettings().trials:
        given = given | {"trials": MAX_TRIALS}
    return replace(settings, space=space, fixed=fixed, **given), name


def _prepare(root: Path, name: str | None, settings: SweepSettings, *, trust_code: bool) -> SweepFolder:
    """Return the folder of the sweep, which is created unless the same sweep exists. Raises UsageError."""
    from engine.runs.metric_directions import read_directions
    from engine.sweeps.folder import is_sweep_folder, require_own
    from engine.sweeps.plan import plan_sweep
    from engine.sweeps.settings import with_direction
    from engine.sweeps.start import choose_folder, create_sweep
    from engine.sweeps.study import require_optuna

    require_optuna()
    settings = with_direction(settings, read_directions(root))
    # Before the name, so that all problems of the arguments are in one message.
    plan = plan_sweep(settings, root, trust=trust_option(granted=trust_code), trust_code=trust_code)
    for warning in plan.warnings:
        print_warning(warning)
    folder = choose_folder(root, name, settings)
    if is_sweep_folder(folder.path):
        require_own(folder, trust_owner=False)
    else:
        create_sweep(folder, plan)
    return folder


def _prepare_resume(
    root: Path, reference: str, words: list[str], given: dict[str, Any], name: str | None, gpus: str | None, *,
    trust_owner: bool,
) -> SweepFolder:  # fmt: skip
    """Return the folder of the sweep to continue. Raises UsageError if a flag would change what it searches."""
    from engine.sweeps.folder import find_sweep
    from engine.sweeps.settings import CHANGEABLE
    from engine.sweeps.study import require_optuna
    from engine.utils.errors import UsageError

    require_optuna()
    others = [*words, *(f"--{key}" for key in given if key not in CHANGEABLE)]
    others += ["--name"] if name is not None else []
    others += ["--gpus"] if gpus is not None else []
    if others:
        reason = f"{', '.join(others)} cannot change: a sweep continues with its settings"
        raise UsageError.one("--resume", reason, "only --trials and --parallel may differ", code="conflict")
    return find_sweep(root, reference, trust_owner=trust_owner)


def _number_flags(given: dict[str, Any]) -> list[str]:
    return [part for key in ("trials", "parallel") if key in given for part in (f"--{key}", str(given[key]))]


def _run(folder: SweepFolder, given: dict[str, Any], flags: list[str], *, trust_code: bool) -> int:
    """Run the controller in this process and return its exit code. Raises UsageError."""
    from engine.sweeps.start import load_sweep, run_sweep
    from tui.launcher import gputrain_command

    plan = load_sweep(folder, trials=given.get("trials"), parallel=given.get("parallel"), trust_code=trust_code)
    return run_sweep(folder, plan, command=gputrain_command(), flags=flags, emit=_print_line)


def _print_line(line: str) -> None:
    """Print progress; a terminal that is gone must not end the sweep."""
    from engine.utils.text import printable

    with suppress(OSError):
        typer.echo(printable(line), err=True)


def _detach(folder: SweepFolder, flags: list[str]) -> None:
    """Start the controller in the background, and print the name of the sweep once it runs. Raises UsageError."""
    from engine.launch.detached import start_detached
    from engine.utils.errors import UsageError
    from tui.launcher import gputrain_command

    root = folder.path.parent
    arguments = ["sweep", "--resume", folder.name, "--runs-dir", str(root), *flags]
    launched = start_detached([*gputrain_command(), *arguments], root)
    if launched.warning is not None:
        print_warning(launched.warning)
    deadline = time.monotonic() + DETACH_TIMEOUT_SECONDS
    while not folder.is_running() and time.monotonic() < deadline:
        if launched.exit_code is not None:
            if launched.exit_code == 0:
                break
            reason = "; ".join(launched.output_lines()[-3:]) or "it ended at once"
            raise UsageError.one(folder.name, f"the sweep could not be started: {reason}", code="not-started")
        time.sleep(0.05)
    typer.echo(folder.name)
    typer.echo(f"Watch it with `gputrain sweep show {folder.name}`.", err=True)


def _find(root: Path, words: list[str], *, trust_owner: bool) -> SweepFolder:
    from engine.sweeps.folder import find_sweep
    from engine.utils.errors import UsageError

    if len(words) > 2:
        raise UsageError.one(" ".join(words[2:]), f"gputrain sweep {words[0]} takes one name", code="too-many")
    return find_sweep(root, words[1] if len(words) == 2 else "last", trust_owner=trust_owner)


def _show(folder: SweepFolder, *, as_json: bool) -> None:
    from engine.sweeps.status import SweepReader
    from tui.tables.sweeps import sweep_lines

    status = SweepReader(folder).poll()
    typer.echo(json.dumps(status.to_dict(), indent=2) if as_json else "\n".join(sweep_lines(status)))


def _stop(folder: SweepFolder) -> None:
    """Ask the controller to stop its trials, and wait until it has ended. Raises UsageError."""
    from engine.runs.control import send_request

    if not folder.is_running():
        typer.echo(f"{folder.name} is not running.", err=True)
        return
    send_request(folder.control, "stop")
    while folder.is_running():
        time.sleep(0.2)
    typer.echo(f"{folder.name} has stopped.", err=True)
