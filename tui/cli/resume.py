"""`gputrain resume`: continue a run in the foreground, in the background or on the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from engine.base.errors import UsageError
from engine.base.libraries import check_training
from engine.jobs.command.spec import has_command
from tui.cli.command import command, takes
from tui.cli.config_arguments import ChangesArgument, FlagOverrides, config_flags
from tui.cli.options import run_argument
from tui.cli.resume_command import renew_command, stored_command
from tui.cli.run_command import (
    CommandOptions,
    ResumeCommand,
    check_keys,
    check_no_options,
    is_command_key,
)
from tui.cli.run_options import find_runs
from tui.cli.train import EXIT_CODES, StartOptions, build_request, start_run

COMMAND_ADVICE = "a command starts again as it was typed; --on-resume adds arguments, and a new run can have others"


@command(
    [
        "gputrain resume last",
        "gputrain resume fashion-17 --headless --epochs 30",
        "gputrain resume train-3 --queue --detach --env WANDB_API_KEY",
    ],
    "A command starts again with the arguments of --on-resume behind its own, in the environment that it was first "
    "started with; the variables of Slurm are those of this shell. Its exit code is that of `gputrain run -- COMMAND`.",
    exit_codes=EXIT_CODES,
    kind=ResumeCommand,
)
@config_flags()
@takes("start", StartOptions)
@takes("options", CommandOptions, only=("env", "on_resume"))
def resume(
    *,
    run: Annotated[str, run_argument()],
    changes: ChangesArgument = None,
    flags: FlagOverrides,
    start: StartOptions,
    options: CommandOptions,
    context: typer.Context,
) -> None:
    """Resume a run from its last checkpoint, or start its command again.

    The run keeps the config it was started with, except for the values set here.
    """
    from engine.config.loader import resolve_config

    [folder] = find_runs([run], start.runs_dir, trust_owner=start.trust_owner)
    is_command = has_command(folder)
    context.meta[ResumeCommand.IS_COMMAND] = is_command
    if not is_command:
        check_no_options(options, "gputrain run … -- COMMAND")
        check_training("gputrain resume")
    if not folder.config.exists():
        raise UsageError.one(folder.name, "has no config.yaml to resume with; start a new run", code="not-found")
    if is_command and (words := [word for word in changes or [] if not is_command_key(word.partition("=")[0])]):
        raise UsageError.one(
            " ".join(words), "sets a training of gputrain, but this is a command", COMMAND_ADVICE, code="no-effect"
        )
    if words := [change for change in changes or [] if "=" not in change]:
        raise UsageError.one(" ".join(words), "set values as section.key=value", code="invalid-value")
    own: FlagOverrides = {"run.resume": ("gputrain resume", True), "run.name": ("gputrain resume", folder.name)}
    typed, name = flags.get("run.name", own["run.name"])
    if name != folder.name:
        raise UsageError.one(
            "run.name", f"is set to different values by gputrain resume and {typed}; keep one", code="conflict"
        )
    start = replace(start, runs_dir=str(folder.path.parent))
    request = build_request(
        lambda: resolve_config(str(folder.config), changes or [], flags | own, trust_code=start.trust_code), start
    )
    if is_command:
        check_keys(request.typed, flags, COMMAND_ADVICE)
        command = renew_command(stored_command(folder, trust_code=start.trust_code), options)
        request = replace(request, command=command, warnings=())
    start_run(request, start)
