"""Gradient checkpointing keeps fewer activations, and changes neither losses nor weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.config.loader import resolve_config
from engine.runs.events import EpochEvent, Event, StepEvent
from engine.train.loop.loop import training_loop
from engine.train.models.factory import build_model
from engine.train.models.grad_checkpointing import checkpoint_gradients
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    source, _, model = name.rpartition(":")
    config = resolve_config(None, [f"model.name={model}", f"model.source={source or 'auto'}"]).config
    return build_model(config, 3, 5, 32).train()


def kept_bytes_and_gradients(model: nn.Module) -> tuple[int, list[Tensor]]:
    """Return the bytes of the activations that a forward pass keeps, and the gradients of the backward pass."""
    kept = 0

    def pack(value: Tensor) -> Tensor:
        nonlocal kept
        kept += value.nbytes
        return value

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = model(torch.randn(2, 3, 32, 32)).square().sum()
    return kept, list(torch.autograd.grad(loss, [*model.parameters()]))


@pytest.mark.parametrize("name", ["resnet18-small", "mobilenet_v3_small", "timm:resnet10t", "timm:test_vit"])
def test_grad_checkpointing_keeps_fewer_activations_and_the_gradients(name: str) -> None:
    if name.startswith("timm"):
        pytest.importorskip("timm")
    kept, gradients = kept_bytes_and_gradients(build(name))
    model = build(name)
    checkpoint_gradients(model, name)
    fewer, same = kept_bytes_and_gradients(model)
    assert fewer < 0.7 * kept
    assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
    assert model.state_dict().keys() == build(name).state_dict().keys()


def test_run_with_grad_checkpointing_has_the_same_losses_and_weights() -> None:
    data = ("data.dataset=fake", "data.fake_train=32", "data.fake_val=8", "data.image_size=8", "data.batch_size=4")
    recipe = (*data, "model.name=resnet18-small", "model.ema=0.9", "optim.accumulate=2", "run.epochs=1")
    results = []
    for value in ("false", "true"):
        events: list[Event] = []
        overrides = (*recipe, "run.log_every=1", f"model.grad_checkpointing={value}")
        with single_rank_trainer(*overrides, events=events, base=None) as trainer:
            training_loop(trainer)
            weights = trainer.model.network.state_dict()
        epoch = next(event for event in events if isinstance(event, EpochEvent))
        losses = [loss for event in events if isinstance(event, StepEvent) for loss in event.losses]
        results.append((losses, epoch.val_loss, epoch.ema_val_loss, weights))
    assert len(results[0][0]) == 4 and results[0][:3] == results[1][:3]
    assert all(torch.equal(value, results[1][3][name]) for name, value in results[0][3].items())


def test_grad_checkpointing_refuses_model_without_blocks() -> None:
    with raises_problem("not-supported", "model.grad_checkpointing", " cnn"):
        checkpoint_gradients(build("cnn"), "cnn")
