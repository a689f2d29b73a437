"""What repeats the best trial of a sweep: its config as a file, and the command that trains or runs it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.base.codec import write_record
from engine.base.files import replace_file
from engine.base.text import printable
from engine.config.loader import resolve_config
from engine.config.schema import as_stored
from engine.config.yaml_io import to_yaml
from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.plan import trial_line, trial_overrides, without_name
from engine.jobs.sweeps.settings import SweepSettings
from engine.jobs.sweeps.space import Value
from engine.runs.run_config import default_values, read_changed_config
from engine.runs.trials import BestTrial

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

LONGER_FACTOR = 5
"""How many times the epochs of a trial the best config is trained for, as suggested."""


def write_best(folder: SweepFolder, settings: SweepSettings, best: FrozenTrial) -> None:
    """Write the run name of the best trial. For a training, also write the config keys that it changes.

    The devices of the trials are left out, because only the sweep needs them. Raises OSError."""
    write_record(folder.best_trial, BestTrial(run=folder.trial(best.number).name))
    if settings.command:
        return
    config = resolve_config(str(folder.config), trial_overrides(settings, best.params), trust_code=True).config
    changed = as_stored(without_name(config), only_changed=True)
    head = f"# Trial {best.number} of {folder.name}: {printable(settings.metric_name)} {best.value}\n"
    text = head + (to_yaml(changed) if changed else "")
    replace_file(folder.best, lambda file: file.write(text.encode()))


def longer_arguments(folder: SweepFolder, params: Mapping[str, Value]) -> list[str]:
    """Return the arguments of `gputrain` that train the best config longer, with a name unless it is taken."""
    config = {**default_values(), **(read_changed_config(folder.config) or {}), **params}
    epochs = int(config["run.epochs"]) * LONGER_FACTOR
    name = f"{folder.name}-best"
    named = [] if folder.path.with_name(name).exists() else ["--name", name]
    return ["run", str(folder.best), "--epochs", str(epochs), *named]


def best_command(folder: SweepFolder, settings: SweepSettings, params: Mapping[str, Value]) -> str:
    """Return what trains the best config longer, as a clause, or the command of the best trial without secrets."""
    if not settings.command:
        return f"train it longer with `gputrain {shlex.join(longer_arguments(folder, params))}`"
    return f"its command: {trial_line(settings, params)}"
