"""Maps the flags of `gputrain run` to config keys, and a config back to the command that produces it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config.command_line import format_value

if TYPE_CHECKING:
    from engine.config.schema import Config

# Name of the option, with underscores, -> config key. The most used ones come first in the help.
FLAG_TO_KEY = {
    "dataset": "data.dataset",
    "data_path": "data.path",
    "task": "task.name",
    "image_size": "data.image_size",
    "model": "model.name",
    "epochs": "run.epochs",
    "batch_size": "data.batch_size",
    "loss": "loss.name",
    "lr": "optim.lr",
    "optimizer": "optim.name",
    "scheduler": "schedule.name",
    "amp": "precision.amp",
    "workers": "data.workers",
    "seed": "run.seed",
    "ranks": "device.ranks",
    "launcher": "device.launcher",
    "gpus": "device.gpus",
    "queue": "device.wait",
    "name": "run.name",
    "resume": "run.resume",
    "snapshot": "run.snapshot",
    "after": "queue.after",
    "begin": "queue.begin",
    "time_limit": "queue.time_limit",
    "min_free": "queue.min_free",
    "share": "queue.share",
    "priority": "queue.priority",
}
FLAG_METAVARS = {
    "dataset": "NAME", "data_path": "PATH", "task": "NAME", "image_size": "N", "model": "NAME", "epochs": "N",
    "batch_size": "N", "loss": "NAME", "lr": "LR", "optimizer": "NAME", "scheduler": "NAME", "amp": "LEVEL",
    "workers": "N", "seed": "N", "ranks": "N", "launcher": "NAME", "gpus": "GPUS", "name": "NAME", "after": "RUN",
    "begin": "TIME", "time_limit": "TIME", "min_free": "SIZE", "share": "N", "priority": "N",
}  # fmt: skip
BOOLEAN_FLAGS = {"queue", "resume", "snapshot"}
# A run that sets one of them does not start on GPUs that are in use.
WAITING_KEYS = {"device.wait", "queue.after", "queue.begin", "queue.min_free"}


def run_arguments(base: str | None, base_config: Config, config: Config) -> list[str]:
    """Return the arguments of `gputrain` that resolve to `config`.

    `base` is a config file or preset that resolves to `base_config`. Keys that differ become flags or overrides.
    """
    from engine.config.resume import find_changes
    from engine.config.schema import as_dict

    flag_of = {key: f"--{flag.replace('_', '-')}" for flag, key in FLAG_TO_KEY.items()}
    values = as_dict(config)
    flags: list[str] = []
    overrides: list[str] = []
    for key, _, _ in find_changes(as_dict(base_config), config):
        section, name = key.split(".")
        value = values[section][name]
        text = format_value(value) or "null"
        if key not in flag_of or value is False or value == [] or text.startswith("-"):
            overrides.append(f"{key}={text}")
        elif value is True:
            flags.append(flag_of[key])
        else:
            flags += [flag_of[key], ",".join(value) if isinstance(value, list) else text]
    return ["run", *([base] if base is not None else []), *flags, *overrides]
