"""One step that is thrown away, before the first: it settles how gradients are sent, and shows whether the model can
train as the config wants it."""

from __future__ import annotations

import torch

from engine.freeze import set_training
from engine.lines import counted
from engine.loop import Trainer
from engine.parallel import images_to_try
from engine.precision import autocast, input_type
from engine.problems import Problem, UsageError
from engine.rng import rng_state, set_rng_state


def warm_up(t: Trainer) -> None:
    """Forward and back, with the model's state put back after it. Raises UsageError where the model cannot.

    DDP sorts its gradient buckets anew after the first backward, which changes the order of additions: a resumed run
    would differ from an uninterrupted one if the first real step were the first of all.
    """
    buffers = {name: buffer.clone() for name, buffer in t.model.named_buffers()}
    state = rng_state(t.device)
    set_training(t.model, t.frozen)
    count = images_to_try(t.shares)
    images = torch.rand((count, t.image_format.channels, t.image_format.size, t.image_format.size), device=t.device)
    try:
        with autocast(t.config.precision, t.device):
            out = t.wrapped(images.to(input_type(t.config.precision)))
        out.float().sum().backward()
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
    t.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in t.model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(state, t.device)


def _unfit(t: Trainer, count: int, error: Exception) -> Problem | None:
    """What an error of the throw-away step says of the config; None where it is none of its faults."""
    config = t.config
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
