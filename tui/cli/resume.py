"""`gputrain resume`: continue a run in the foreground, in the background or on the screen."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from tui.cli.command import command
from tui.cli.config_arguments import ChangesArgument
from tui.cli.config_flags import FlagOverrides, config_flags
from tui.cli.options import run_argument
from tui.cli.run_command import check_keys, stored_command
from tui.cli.run_options import find_runs
from tui.cli.train import EXIT_CODES, StartOptions, build_request, start_run, takes_start


@command(
    ["gputrain resume last", "gputrain resume fashion-17 --headless --epochs 30"],
    exit_codes=EXIT_CODES,
)
@config_flags()
@takes_start
def resume(
    *,
    run: Annotated[str, run_argument()],
    changes: ChangesArgument = None,
    flags: FlagOverrides,
    start: StartOptions,
) -> None:
    """Resume a run from its last checkpoint, or start its command again.

    The run keeps the config it was started with, except for the values set here.
    """
    from engine.command.spec import has_command
    from engine.config.loader import resolve_config
    from engine.utils.errors import UsageError
    from engine.utils.libraries import check_training

    [folder] = find_runs([run], start.runs_dir, trust_owner=start.trust_owner)
    is_command = has_command(folder)
    if not is_command:
        check_training("gputrain resume")
    if not folder.config.exists():
        raise UsageError.one(folder.name, "has no config.yaml to resume with; start a new run", code="not-found")
    if any("=" not in change for change in changes or []):
        raise UsageError.one(" ".join(changes or []), "set values as section.key=value", code="invalid-value")
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
        check_keys(request, flags)
        request = replace(request, command=stored_command(folder, trust_code=start.trust_code), warnings=())
    start_run(request, start)
