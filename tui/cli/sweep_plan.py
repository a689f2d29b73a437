"""What `gputrain sweep` makes of its options before it starts: the metric, the plan, and the folder of the sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tui.cli.config_arguments import trust_option
from tui.cli.config_flags import FlagOverrides
from tui.cli.run_command import check_keys

if TYPE_CHECKING:
    from engine.command.spec import Command
    from engine.sweeps.folder import SweepFolder
    from engine.sweeps.plan import SweepPlan
    from engine.sweeps.settings import SweepSettings
    from engine.utils.errors import Problem


def metric_setting(maximize: str | None, minimize: str | None, *, is_script: bool) -> dict[str, Any]:
    """Return the setting `metric` of the two options, if one is given. Raises UsageError."""
    from engine.runs.metrics import Better
    from engine.sweeps.script import script_metric
    from engine.sweeps.settings import metric_in_direction
    from engine.utils.errors import UsageError

    if maximize is not None and minimize is not None:
        raise UsageError.one("--maximize", "cannot be combined with --minimize; keep one", code="conflict")
    metric = script_metric if is_script else metric_in_direction
    if maximize is not None:
        return {"metric": metric("--maximize", maximize, Better.HIGH)}
    return {} if minimize is None else {"metric": metric("--minimize", minimize, Better.LOW)}


def plan_config_sweep(settings: SweepSettings, root: Path, problems: list[Problem], *, trust_code: bool) -> SweepPlan:
    """Return the plan of a sweep of trainings.

    Raises UsageError with `problems`, which have been found before, and its own: those of a line are in one message.
    """
    from engine.runs.metric_directions import read_directions
    from engine.sweeps.plan import plan_sweep
    from engine.sweeps.settings import with_direction
    from engine.utils.errors import collect_problems, raise_if_any

    settings = with_direction(settings, read_directions(root))
    with collect_problems(problems):
        plan = plan_sweep(settings, root, trust=trust_option(granted=trust_code), trust_code=trust_code)
    raise_if_any(problems)
    return plan


def plan_script_sweep(
    settings: SweepSettings,
    command: Command,
    flags: FlagOverrides,
    root: Path,
    problems: list[Problem],
    *,
    trust_code: bool,
) -> SweepPlan:
    """Return the plan of a sweep of a script. Raises UsageError as `plan_config_sweep` does."""
    from engine.runs.metric_directions import read_directions
    from engine.sweeps.script import plan_script, with_script_direction
    from engine.utils.errors import collect_problems, raise_if_any

    has_metric_problem = bool(problems)
    with collect_problems(problems):
        check_keys(flags, flags)
    if not has_metric_problem:
        with collect_problems(problems):
            settings = with_script_direction(settings, read_directions(root))
    with collect_problems(problems):
        plan = plan_script(settings, command, root, trust=trust_option(granted=trust_code))
    raise_if_any(problems)
    return plan


def create_unless_there(folder: SweepFolder, plan: SweepPlan) -> None:
    """Create the folder of a sweep unless the same sweep exists. Raises UsageError."""
    from engine.sweeps.folder import is_sweep_folder, require_own
    from engine.sweeps.start import create_sweep

    if is_sweep_folder(folder.path):
        require_own(folder, trust_owner=False)
    else:
        create_sweep(folder, plan)
