"""Early stopping: end a run whose validation accuracy no longer improves (`run.early_stop`).

Every rank of `engine.training` has one `EarlyStop` and passes it the same all-reduced accuracy, so all ranks decide
alike without a collective of its own. `engine.launch.ranks` replays the epochs of a finished run with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from engine.config.run_sections import RunConfig
from engine.runs.events import EpochEvent
from engine.runs.metrics import METRICS

MONITORED = "best_val_accuracy"


class EarlyStop:
    """Counts the epochs since the last gain of the accuracy that selects the best epoch.

    An accuracy is a gain if it exceeds `reference`, that of the last gain, by more than `run.early_stop_min_delta`.
    """

    def __init__(self, run: RunConfig) -> None:
        self._patience, self._min_delta = run.early_stop, run.early_stop_min_delta
        self.reference, self.stale_epochs = -math.inf, 0

    @property
    def expired(self) -> bool:
        """Whether training ends: there was no gain for `run.early_stop` epochs."""
        return 0 < self._patience <= self.stale_epochs

    def step(self, accuracy: float | None) -> None:
        """Add the validation accuracy of the next epoch. NaN and None count as no improvement."""
        if accuracy is not None and accuracy > self.reference + self._min_delta:
            self.reference, self.stale_epochs = accuracy, 0
        else:
            self.stale_epochs += 1

    def state_dict(self) -> dict[str, float]:
        """Return the progress for a checkpoint; patience and least gain come from the current config."""
        return {"reference": self.reference, "stale_epochs": self.stale_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress that `state_dict` returned."""
        self.reference = float(state["reference"])
        self.stale_epochs = int(state["stale_epochs"])


def has_stopped_early(run: RunConfig, epochs: Iterable[EpochEvent]) -> bool:
    """Whether a run with these epochs has nothing left to train."""
    early_stop = EarlyStop(run)
    for epoch in epochs:
        early_stop.step(METRICS[MONITORED].of_epoch(epoch))
    return early_stop.expired
