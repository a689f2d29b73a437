"""Results of a benchmark: how fast a run trains, read from its journal, and the scaling over all runs.

Called by `runner` and by the `gputrain bench` command.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.runs.history import History

# The first epoch is excluded as warmup: caches fill, and cuDNN and torch.compile select algorithms.
MIN_EPOCHS = 2


@dataclass(frozen=True)
class Speed:
    """How fast a number of ranks trains. Unknown values are None.

    - `message`: why the run failed, or cannot be measured.
    - `seconds_per_epoch` with evaluation, `images_per_second`: medians over all epochs except the first.
    - `speed_up`: throughput relative to the smallest number of ranks, which counts as a speedup of its rank count.
    - `efficiency`: `speed_up` divided by the number of ranks.
    """

    ranks: int
    message: str = ""
    global_batch: int | None = None
    seconds_per_epoch: float | None = None
    images_per_second: float | None = None
    speed_up: float | None = None
    efficiency: float | None = None


def measure(history: History, ranks: int) -> Speed:
    """Return how fast a run has trained, from its journal."""
    epochs = history.epochs[1:]
    # NaN is null in a journal.
    seconds, rates = [epoch.seconds for epoch in epochs], [epoch.images_per_second for epoch in epochs]
    if history.started is None or not epochs or None in (*seconds, *rates):
        return Speed(ranks, "too short to measure: needs 2 complete epochs, because the first is excluded as warmup")
    return Speed(
        ranks,
        global_batch=history.started.global_batch,
        seconds_per_epoch=statistics.median(seconds),
        images_per_second=statistics.median(rates),
    )


def with_speed_ups(speeds: Sequence[Speed]) -> list[Speed]:
    """Return the speeds in ascending order of ranks, with what they are relative to the first that was measured."""
    found: list[Speed] = []
    per_rank: float | None = None
    for speed in sorted(speeds, key=lambda each: each.ranks):
        if (rate := speed.images_per_second) is not None:
            # Without a run on one rank, linear scaling up to the smallest number of ranks is assumed.
            per_rank = rate / speed.ranks if per_rank is None else per_rank
            speed = replace(speed, speed_up=rate / per_rank, efficiency=rate / per_rank / speed.ranks)
        found.append(speed)
    return found
