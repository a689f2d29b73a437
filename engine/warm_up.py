"""One step that is thrown away, before the first: it settles how gradients are sent, and shows whether the model can
train as the config wants it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.compiled import end_compilers, refused
from engine.events import Warned
from engine.freeze import set_training
from engine.lines import counted
from engine.loop import Trainer
from engine.parallel import images_to_try
from engine.precision import autocast, input_type
from engine.problems import Problem, UsageError
from engine.rng import rng_state, set_rng_state

# CUDA graphs are recorded in the second, and replayed from the third on.
COMPILED_STEPS = 3


def warm_up(t: Trainer) -> None:
    """Forward and back, with the model's state put back after it; and all of the compiling, where the model is to be
    compiled. Raises UsageError where the model cannot.

    DDP sorts its gradient buckets anew after the first backward, which changes the order of additions: a resumed run
    would differ from an uninterrupted one if the first real step were the first of all.
    """
    buffers = {name: buffer.clone() for name, buffer in t.model.named_buffers()}
    state = rng_state(t.device)
    set_training(t.model, t.frozen)
    count = images_to_try(t.shares)
    try:
        _forward(t, t.wrapped, count).float().sum().backward()
    except (ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or (problem := _unfit(t, count, error)) is None:
            raise
        raise UsageError([problem]) from error
    unused = [name for name, one in t.model.named_parameters() if one.requires_grad and one.grad is None]
    if unused:
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise UsageError.one(
            "model.name",
            f"{t.config.model.name} does not use {', '.join(unused[:3])}{more} for what it gives, so nothing could be "
            "learned of them; take them out of the model, or freeze them with model.freeze",
        )
    if t.config.model.compile:
        _compile(t)
        set_training(t.model, t.frozen)
    t.forget_gradients()
    with torch.no_grad():
        for name, buffer in t.model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(state, t.device)


def _forward(t: Trainer, model: nn.Module, count: int) -> Tensor:
    images = torch.rand((count, t.image_format.channels, t.image_format.size, t.image_format.size), device=t.device)
    with autocast(t.config.precision, t.device):
        return t.logits_of(model, images, input_type(t.config.precision))


def _compile(t: Trainer) -> None:
    """For training and for evaluation, by their first whole batches. Raises UsageError where that cannot be done."""
    if t.shares.rank == 0:
        name, mode = t.config.model.name, t.config.model.compile_mode
        t.channel.send(Warned(message=f"compiling {name} (model.compile_mode {mode}), which can take minutes"))
    try:
        for _ in range(COMPILED_STEPS):
            t.forget_gradients()
            _forward(t, t.wrapped, t.shares.batch_size).float().sum().backward()
        t.model.eval()
        with torch.no_grad():
            for _ in range(COMPILED_STEPS):
                _forward(t, t.model, t.shares.batch_size)
    except Exception as error:
        if (problem := refused(t.config, error)) is None:
            raise
        raise problem from error
    end_compilers()


def _unfit(t: Trainer, count: int, error: Exception) -> Problem | None:
    """What an error of the throw-away step says of the config; None where it is none of its faults."""
    config = t.config
    if "view size is not compatible" in str(error) and t.memory_format is torch.channels_last:
        return Problem(
            "model.channels_last",
            f"{config.model.name} cannot take such images: {error} Or give model.channels_last=off",
        )
    if "more than 1 value per channel" in str(error):
        return Problem(
            "data.batch_size",
            f"{config.model.name} cannot train on {count} image a rank, the smallest batch of an epoch: {error}; "
            "give another batch size, or data.drop_last=true",
        )
    if input_type(config.precision) == torch.float16:
        what = f"{config.model.name} cannot compute in float16 alone ({error}); give fp16, bf16 or off"
        return Problem("precision.amp", f"{config.precision.amp}: {what}")
    if isinstance(error, ValueError):
        return Problem("model.name", f"{config.model.name} fails on a batch of {counted(count, 'image')}: {error}")
    return None
