"""`gputrain resume`: continue a run in the foreground, in the background or on the screen."""

from __future__ import annotations

import sys
from typing import Annotated

from tui.cli.command import command
from tui.cli.config_arguments import ChangesArgument
from tui.cli.config_flags import FlagOverrides, config_flags
from tui.cli.options import (
    DetachedOption,
    DetachOption,
    EventsJsonOption,
    HeadlessOption,
    RunsDirOption,
    TakeOverOption,
    TrustCodeOption,
    TrustOwnerOption,
    run_argument,
)
from tui.cli.run_options import find_runs
from tui.cli.train import (
    EXIT_CODES,
    build_request,
    run_headless,
    run_with_screen,
    should_open_screen,
    start_in_background,
)


@command(
    ["gputrain resume last", "gputrain resume fashion-17 --headless --epochs 30"],
    exit_codes=EXIT_CODES,
)
@config_flags()
def resume(
    *,
    run: Annotated[str, run_argument()],
    changes: ChangesArgument = None,
    headless: HeadlessOption = False,
    detach: DetachOption = False,
    detached: DetachedOption = False,
    flags: FlagOverrides,
    runs_dir: RunsDirOption = None,
    as_json: EventsJsonOption = False,
    take_over: TakeOverOption = False,
    trust_owner: TrustOwnerOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Resume a run from its last checkpoint.

    The run keeps the config it was started with, except for the values set here.
    """
    from engine.config.loader import resolve_config
    from engine.utils.errors import UsageError

    [folder] = find_runs([run], runs_dir, trust_owner=trust_owner)
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
    root = str(folder.path.parent)
    request = build_request(
        lambda: resolve_config(str(folder.config), changes or [], flags | own, trust_code=trust_code),
        None,
        root,
        trust_owner=trust_owner,
        trust_code=trust_code,
        take_over=take_over,
        detached=detached,
    )
    if detach and as_json:
        raise UsageError.one("--detach", "cannot be combined with --json", code="conflict")
    if detach:
        start_in_background(request, sys.argv[1:], root)
    elif should_open_screen(headless=headless or as_json):
        run_with_screen(request, sys.argv[1:], root)
    else:
        run_headless(request, as_json=as_json)
