"""Muon for weight matrices and, as an option, convolution filters; AdamW for the other parameters.

`engine.optim.optimizers` builds it. The Newton-Schulz iteration, the momentum and the weight decay are torch's.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim._muon import muon

from engine.optim.param_groups import ParamGroup

MuonConv = Literal["off", "on", "normalize"]
# Keys of a group that `muon` takes.
MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
MATRIX_DIMENSIONS, FILTER_DIMENSIONS = 2, 4


class FilterMuon(Optimizer):
    """Muon for convolution filters, each flattened to a matrix with one row per output channel.

    With `normalize`, each step first scales a filter to the Frobenius norm sqrt(output channels). Both are those of
    airbench94_muon.py (https://github.com/KellerJordan/cifar10-airbench; Jordan et al., "Muon: An optimizer for hidden
    layers in neural networks", 2024).
    """

    def __init__(self, param_groups: list[ParamGroup], options: dict[str, Any], *, normalize: bool) -> None:
        # torch's Muon, which takes matrices alone, checks the options and supplies the others.
        super().__init__(param_groups, optim.Muon([torch.empty(1, 1)], **options).defaults)
        self._normalize = normalize

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            filters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in filters:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                if self._normalize:
                    norm = parameter.norm()
                    # A filter that starts at 0 has no direction to keep.
                    parameter.mul_(torch.where(norm > 0, len(parameter) ** 0.5 / norm, 1.0))
            muon(
                [_as_matrix(parameter, parameter) for parameter in filters],
                [_as_matrix(parameter.grad, parameter) for parameter in filters],
                [_as_matrix(self.state[parameter]["momentum_buffer"], parameter) for parameter in filters],
                has_complex=False,
                **{key: group[key] for key in MUON_OPTIONS},
            )


def _as_matrix(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a tensor with the shape of `parameter` as a matrix with one row per output channel.

    It is a view if the strides are those of the parameter. The columns are in the order of the parameter's memory, for
    example channels last; the update does not depend on it, because X @ X.T does not.
    """
    columns = sorted(range(1, parameter.ndim), key=parameter.stride, reverse=True)
    return value.permute(0, *columns).reshape(len(value), -1)


class MuonAdamW(Optimizer):
    """Muon for all two-dimensional parameters and AdamW for the others, as one optimizer.

    With `conv`, convolution filters, which have four dimensions, are Muon's too. Otherwise a convolutional network
    trains with AdamW except for its linear layers; most weights of a vision transformer are matrices. The groups are
    those of `optimizers` in order, and the state is the union of theirs.
    """

    def __init__(
        self,
        param_groups: list[ParamGroup],
        muon_options: dict[str, Any],
        adamw_options: dict[str, Any],
        conv: MuonConv = "off",
    ) -> None:
        matrices = _select(param_groups, {MATRIX_DIMENSIONS})
        filters = _select(param_groups, muon_dimensions(conv) - {MATRIX_DIMENSIONS})
        others = _select(param_groups, muon_dimensions(conv), excluded=True)
        self.optimizers: list[Optimizer] = []
        if matrices:
            self.optimizers.append(optim.Muon(matrices, **muon_options))
        if filters:
            self.optimizers.append(FilterMuon(filters, muon_options, normalize=conv == "normalize"))
        if others:
            self.optimizers.append(optim.AdamW(others, **adamw_options))
        named = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        super().__init__(named, {})
        self._share_state()

    def _share_state(self) -> None:
        """Make all optimizers use this optimizer's groups and state."""
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


def muon_dimensions(conv: MuonConv) -> set[int]:
    """Return the numbers of dimensions of the parameters that Muon updates."""
    return {MATRIX_DIMENSIONS} if conv == "off" else {MATRIX_DIMENSIONS, FILTER_DIMENSIONS}


def _select(param_groups: list[ParamGroup], dimensions: set[int], *, excluded: bool = False) -> list[ParamGroup]:
    """Return the groups with the parameters of these numbers of dimensions, or with all others, without empty ones."""

    def selected(group: ParamGroup) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in group["params"] if (value.ndim in dimensions) != excluded]

    return [{**group, "params": selected(group)} for group in param_groups if selected(group)]
