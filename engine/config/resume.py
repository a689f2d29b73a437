"""What a resumed run may change in its config: compare the config of its checkpoint with the one to resume with.

`engine.train.loop.resume` calls it with the config in the checkpoint that the ranks have loaded. Before that,
`engine.jobs.launch.preflight` calls it with the config in the newest checkpoint, whose checksum it does not verify.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from engine.base.errors import Problem
from engine.config.command_line import shown_value
from engine.config.differences import PATH_KEYS, flat_values
from engine.config.notify_section import NotifyConfig
from engine.config.schema import UNSTORED_KEYS, Config, as_dict

# Changing one of these between two sessions of a run would invalidate its weights, optimizer state or data split.
IMMUTABLE_KEYS = {
    *("run.seed", "run.monitor", "run.monitor_mode", "task.name"),
    *("model.name", "model.source", "model.options", "optim.name"),
    *("data.dataset", "data.val_split", "data.image_size", "data.size_schedule", "data.channels"),
    *("data.mean", "data.std", "data.fake_train", "data.fake_val", "data.val_resize", "data.val_crop"),
    *("data.fit", "data.interpolation"),
}
NOTIFY_KEYS = {f"notify.{name}" for name in NotifyConfig.model_fields}
# Messages and the place in the queue do not affect training. `device.ranks` has no effect on GPUs, and
# `engine.train.loop.resume` reports another number of ranks.
UNREPORTED_KEYS = {
    *("run.name", "run.resume", "run.snapshot", "device.ranks", "device.wait", *NOTIFY_KEYS, *UNSTORED_KEYS),
    *("queue.priority", "queue.share", "queue.min_free", "queue.time_limit"),
}

# A key and its values before and after.
KeyChange = tuple[str, Any, Any]


def find_changes(saved: Mapping[str, Any], config: Config) -> list[KeyChange]:
    """Return the keys in which `config` differs from a saved config, in schema order.

    A key that is not saved, because it was added later, has its default value. Two spellings of one path are equal.
    """
    before, after = flat_values(saved), flat_values(as_dict(config))
    return [
        (key, before[key], value)
        for key, value in after.items()
        if before[key] != value
        and not (key in PATH_KEYS and None not in (before[key], value) and _real(before[key]) == _real(value))
    ]


def _real(path: Any) -> str:
    return os.path.realpath(str(path))


def immutable_key_problems(changes: list[KeyChange]) -> list[Problem]:
    """Return a problem for each of the `IMMUTABLE_KEYS` that has changed."""
    problems = []
    for key, before, value in changes:
        if key not in IMMUTABLE_KEYS:
            continue
        reason = f"cannot change when a run is resumed: it began with {shown_value(before)}, not {shown_value(value)}"
        advice = f"set {key} to {shown_value(before)} again, or use a new name with --name to start a new run"
        problems.append(Problem(key, reason, advice, code="resume-differs"))
    return problems


def describe_changes(changes: list[KeyChange]) -> list[Problem]:
    """Return a warning for each changed key that affects the resumed run."""
    warnings = []
    for key, before, value in changes:
        if key in UNREPORTED_KEYS:
            continue
        reason = f"changed from {shown_value(before)} to {shown_value(value)} since the checkpoint"
        warnings.append(Problem("", f"{key} {reason}", code="resume-differs"))
    return warnings
