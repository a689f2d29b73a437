"""Muon for weight matrices and AdamW for the other parameters. `engine.optim.optimizers` builds it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from engine.optim.param_groups import ParamGroup


class MuonAdamW(Optimizer):
    """Muon for all two-dimensional parameters and AdamW for the others, as one optimizer.

    A convolutional network trains with AdamW except for its linear layers; most weights of a vision transformer are
    matrices. The groups are those of `optimizers` in order, and the state is the union of theirs.
    """

    def __init__(
        self, param_groups: list[ParamGroup], muon_options: dict[str, Any], adamw_options: dict[str, Any]
    ) -> None:
        self.optimizers: list[Optimizer] = []
        if matrices := _select(param_groups, matrices=True):
            self.optimizers.append(optim.Muon(matrices, **muon_options))
        if others := _select(param_groups, matrices=False):
            self.optimizers.append(optim.AdamW(others, **adamw_options))
        named = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        super().__init__(named, {})
        self._share_state()

    def _share_state(self) -> None:
        """Make both optimizers use this optimizer's groups and state."""
        end = 0
        for optimizer in self.optimizers:
            start, end = end, end + len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[start:end], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_state()

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


def _select(param_groups: list[ParamGroup], *, matrices: bool) -> list[ParamGroup]:
    """Return the groups with their matrices, or with their other parameters, without empty ones."""

    def selected(group: ParamGroup) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in group["params"] if (value.ndim == 2) == matrices]

    return [{**group, "params": selected(group)} for group in param_groups if selected(group)]
