"""The plateau schedule: reduces the learning rate when the validation loss stops improving."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from engine.config.training_sections import ScheduleConfig

# Only the progress is saved; settings such as patience come from the current config.
_SCHEDULER_STATE_KEYS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class PlateauFactor:
    """torch's ReduceLROnPlateau applied to a learning rate of 1, which gives a factor on the actual learning rate.

    For other schedules the factor is always 1.
    """

    def __init__(self, schedule: ScheduleConfig) -> None:
        self._factor_optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self._scheduler = None
        if schedule.name == "plateau":
            self._scheduler = ReduceLROnPlateau(
                self._factor_optimizer,
                factor=schedule.gamma,
                patience=schedule.patience,
                threshold=schedule.threshold,
                cooldown=schedule.cooldown,
                min_lr=schedule.final_lr_ratio,
            )

    @property
    def factor(self) -> float:
        """Current factor on the learning rate, from 1 down to `schedule.final_lr_ratio`."""
        return float(self._factor_optimizer.param_groups[0]["lr"])

    def step(self, val_loss: float) -> None:
        """Update the factor at the end of an epoch; all ranks must pass the same loss."""
        if self._scheduler is not None:
            self._scheduler.step(val_loss)

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        return {"factor": self.factor, **{key: getattr(self._scheduler, key) for key in _SCHEDULER_STATE_KEYS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, unless it or this instance belongs to a schedule other than plateau."""
        if self._scheduler is None or not state:
            return
        self._factor_optimizer.param_groups[0]["lr"] = state["factor"]
        for key in _SCHEDULER_STATE_KEYS:
            setattr(self._scheduler, key, state[key])
