"""Describe the devices of a run, and how long an epoch takes on them.

`engine.runs.history` puts both into summary.json, `engine.runs.event_lines` into the last line of a headless run.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from engine.runs.command_events import CommandStarted
from engine.runs.events import EpochEvent, RunResumed, RunStarted
from engine.utils.text import pluralize


def describe_run_devices(started: RunStarted | CommandStarted) -> str:
    """Return the devices of a run by name, such as `2 x H200 (GPU 0, 3)`, `the CPU` or `16 x H200 on 2 hosts`."""
    if set(started.devices) <= {"cpu"}:
        ranks = started.world_size if isinstance(started, RunStarted) else 1
        return "the CPU" if ranks <= 1 else f"the CPU ({ranks} ranks)"
    names = [record.name.removeprefix("NVIDIA ") for record in started.ranks]
    if not names or not all(names):
        return pluralize(len(started.devices), "GPU")
    hosts = {record.host for record in started.ranks}
    groups = []
    for name in dict.fromkeys(names):
        indices = [record.index for record, other in zip(started.ranks, names, strict=True) if other == name]
        count = f"{len(indices)} x {name}" if len(names) > 1 else name
        is_numbered = len(hosts) == 1 and None not in indices
        groups.append(f"{count} (GPU {', '.join(map(str, indices))})" if is_numbered else count)
    return " and ".join(groups) + (f" on {len(hosts)} hosts" if len(hosts) > 1 else "")


def fully_trained_epochs(started: RunStarted | None, session: Sequence[EpochEvent]) -> list[EpochEvent]:
    """Return the epochs of a session that it trained from their first to their last step."""
    epochs = [epoch for epoch in session if (epoch.images_per_second or 0) > 0 and (epoch.seconds or 0) > 0]
    if isinstance(started, RunResumed) and started.steps_per_epoch > 0 and started.from_step % started.steps_per_epoch:
        partial = started.from_step // started.steps_per_epoch + 1
        epochs = [epoch for epoch in epochs if epoch.epoch != partial]
    return epochs


def mean_epoch_seconds(epochs: Sequence[EpochEvent]) -> float | None:
    """Return the mean duration of these epochs, in seconds; None without any."""
    return round(fmean(epoch.seconds for epoch in epochs), 3) if epochs else None
