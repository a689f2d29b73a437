"""What a healthy step does not do: ask the device for a value, which on a GPU would be a wait for all that it has
still to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from in_process import one_rank
from torch.utils._python_dispatch import TorchDispatchMode

from engine.loop import train_step


class Asking(TorchDispatchMode):
    """Counts how often a value is asked for: by `item`, `tolist`, `bool`, or a copy to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe", [("halt",), ("skip",), ("halt", "model.ema=0.9", "optim.clip_norm=1", "loss.label_smoothing=0.1")]
)
def test_a_healthy_step_asks_for_no_value(recipe: tuple[str, ...]) -> None:
    nonfinite, *more = recipe
    with one_rank(f"optim.nonfinite={nonfinite}", *more) as fit:
        trainer = fit.trainer
        with Asking() as asking:
            train_step(trainer)
        assert asking.count == 0
        with Asking() as asking:
            trainer.log.untold()
            assert trainer.totals.counts.tolist()[1] == 32
            assert trainer.totals.loss.item() > 0
        assert asking.count > 0, "it would have been seen"
