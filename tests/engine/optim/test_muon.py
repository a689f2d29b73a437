"""Muon on convolution filters: the update of airbench, its state, its groups, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from engine.config.loader import resolve_config
from engine.config.training_sections import OptimConfig
from engine.models.memory_format import apply_memory_format
from engine.optim.muon import FilterMuon, MuonAdamW
from engine.optim.optimizers import build_optimizer
from support.messages import has_problem, raises_problem
from support.models.small_model import names_in, refused, resumes_identically, same, small, train


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    # A second thread takes several times as long for such small matrices.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


AIRBENCH = {"adjust_lr_fn": "original"}


def reference_update(momentum_and_gradient: Tensor) -> Tensor:
    """Orthogonalize a matrix by five Newton-Schulz steps with the published coefficients, in float64."""
    matrix = momentum_and_gradient.double()
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def filter_after_steps(conv: str, gradients: Tensor, weight: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a filter after one step per gradient."""
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.to(memory_format=memory_format)
    config = OptimConfig(name="muon", lr=0.1, momentum=0.6, weight_decay=0.05, muon_conv=conv, options=AIRBENCH)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, layer)
    for gradient in gradients:
        layer.weight.grad = gradient.clone(memory_format=memory_format)
        optimizer.step()
    assert layer.weight.is_contiguous(memory_format=memory_format)
    return layer.weight.detach()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("conv", ["on", "normalize"])
@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (40, 2, 3, 3), (6, 10, 1, 1)])
def test_filter_update_is_that_of_airbench(
    conv: str, shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    gradients, weight = torch.randn(3, *shape), torch.randn(shape)
    trained = filter_after_steps(conv, gradients, weight, memory_format)
    expected, momentum = weight.double(), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients.double():
        momentum = 0.6 * momentum + gradient
        nesterov = gradient + 0.6 * momentum
        if conv == "normalize":
            expected = expected * len(expected) ** 0.5 / expected.norm()
        update = reference_update(nesterov.reshape(len(nesterov), -1)).view(shape)
        rows, columns = shape[0], weight[0].numel()
        expected = expected * (1 - 0.1 * 0.05) - 0.1 * max(1, rows / columns) ** 0.5 * update
    # torch's iteration is in bfloat16, which has 8 bits of precision.
    assert (trained - expected).norm() / (expected - weight).norm() < 0.02


def test_filter_update_is_orthogonal() -> None:
    torch.manual_seed(0)
    # Singular values of the gradient from 1 to 100.
    left, _, right = torch.linalg.svd(torch.randn(16, 72), full_matrices=False)
    gradient = (left * torch.logspace(0, 2, 16)) @ right
    weight = torch.zeros(16, 8, 3, 3)
    config = OptimConfig(name="muon", lr=1.0, momentum=0.0, muon_conv="on", options=AIRBENCH)
    layer = nn.Conv2d(8, 16, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    layer.weight.grad = gradient.view_as(weight)
    build_optimizer(config, layer).step()
    values = torch.linalg.svdvals(layer.weight.detach().view(16, -1))
    assert 0.5 < values.min() < values.max() < 1.3


def test_normalize_trains_filter_that_starts_at_zero() -> None:
    torch.manual_seed(0)
    trained = filter_after_steps(
        "normalize", torch.randn(2, 8, 3, 3, 3), torch.zeros(8, 3, 3, 3), torch.contiguous_format
    )
    assert trained.isfinite().all()
    assert trained.norm() > 0


def test_muon_conv_splits_parameters_into_matrices_filters_and_others() -> None:
    config = OptimConfig(name="muon", muon_conv="on", weight_decay=0.1, weight_decay_groups={"norm": 0.0, "0": 0.2})
    optimizer = build_optimizer(config, small())
    assert isinstance(optimizer, MuonAdamW)
    assert [type(part).__name__ for part in optimizer.optimizers] == ["Muon", "FilterMuon", "AdamW"]
    by_name = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert (by_name["0.weight"], by_name["1.weight"], by_name["4.weight"]) == (0.2, 0.0, 0.1)
    assert [name for names in names_in(optimizer) for name in names][:3] == ["4.weight", "5.weight", "0.weight"]


def test_muon_conv_off_is_as_before() -> None:
    model, explicit = small(), small()
    train(model, build_optimizer(OptimConfig(name="muon"), model))
    train(explicit, build_optimizer(OptimConfig(name="muon", muon_conv="off"), explicit))
    with_filters = small()
    train(with_filters, build_optimizer(OptimConfig(name="muon", muon_conv="on"), with_filters))
    assert same(model, explicit)
    assert not same(model, with_filters)


@pytest.mark.parametrize("conv", ["on", "normalize"])
def test_muon_conv_state_is_resumed(conv: str) -> None:
    config = OptimConfig(name="muon", muon_conv=conv)  # type: ignore[arg-type]
    model = small()
    optimizer = build_optimizer(config, model)
    train(model, optimizer)
    assert optimizer.state[model[0].weight].keys() == {"momentum_buffer"}
    assert resumes_identically(config, model, optimizer, small(3))


def test_muon_conv_trains_channels_last_filters_of_resumed_run() -> None:
    config = OptimConfig(name="muon", muon_conv="on")
    model, later = small(), small(3)
    apply_memory_format(model, torch.channels_last)
    apply_memory_format(later, torch.channels_last)
    optimizer = build_optimizer(config, model)
    train(model, optimizer)
    assert resumes_identically(config, model, optimizer, later)


def test_muon_conv_trains_network_without_matrices() -> None:
    optimizer = build_optimizer(OptimConfig(name="muon", muon_conv="on"), nn.Conv2d(1, 2, 3, bias=False))
    assert isinstance(optimizer, MuonAdamW)
    assert isinstance(optimizer.optimizers[0], FilterMuon)
    problems = refused(OptimConfig(name="muon"), nn.Conv2d(1, 2, 3))
    assert has_problem(problems, "not-supported", "optim.name", " adamw ", "optim.muon_conv=on")


def test_muon_conv_has_no_effect_with_other_optimizer_and_stays_in_resumed_run() -> None:
    resolved = resolve_config("digits", ["optim.muon_conv=on"])
    assert [key for key, _ in resolved.no_effect] == ["optim.muon_conv"]
    with raises_problem("unknown-value", "optim.muon_conv", "'yes'"):
        resolve_config("digits", ["optim.name=muon", "optim.muon_conv='yes'"])
