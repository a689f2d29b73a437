"""Steps that are thrown away, before the first: they settle how gradients are sent, show whether the model can train as
the config wants it, and what a step costs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.freeze import set_training
from engine.gpus.peaks import peak_tflops
from engine.lines import counted
from engine.loop import Trainer
from engine.parallel import images_to_try
from engine.precision import autocast, input_type
from engine.problems import Problem, UsageError
from engine.rng import rng_state, set_rng_state

# A step that is as short as this is timed so many times more: something else may come between.
SHORT_SECONDS, MORE_STEPS = 0.01, 8


@dataclass(frozen=True)
class Tried:
    """What the throw-away steps of `images` images showed: `seconds` of the fastest, forward and back, and `flops`, the
    floating-point operations of one image in both. `peak_tflops` is what all GPUs of the run could do in a second. NaN
    what is not known: the last two on the CPU, and the peak of a GPU that is in no table."""

    seconds: float
    images: int
    flops: float
    peak_tflops: float


def warm_up(t: Trainer, hosts: dist.ProcessGroup) -> Tried:
    """Forward and back, with the model's state put back after it. Raises UsageError where the model cannot. Also a
    collective on `hosts`, a group for what lies in host memory.

    DDP sorts its gradient buckets anew after the first backward, which changes the order of additions: a resumed run
    would differ from an uninterrupted one if the first real step were the first of all.
    """
    buffers = {name: buffer.clone() for name, buffer in t.model.named_buffers()}
    state = rng_state(t.device)
    set_training(t.model, t.frozen)
    count = images_to_try(t.shares)
    images = torch.rand((count, t.image_format.channels, t.image_format.size, t.image_format.size), device=t.device)
    try:
        _step(t, images)
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
    seconds = _least_seconds(t, images, hosts)
    flops, peak = (count_flops(t, images), _peak_of_all(t, hosts)) if t.device.type == "cuda" else (math.nan, math.nan)
    t.model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in t.model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(state, t.device)
    return Tried(seconds, count, flops, peak)


def _step(t: Trainer, images: Tensor) -> None:
    with autocast(t.config.precision, t.device):
        out = t.wrapped(images.to(input_type(t.config.precision)))
    out.float().sum().backward()


def _least_seconds(t: Trainer, images: Tensor, hosts: dist.ProcessGroup) -> float:
    """A collective also on `hosts`."""
    # Gradients are sent in another order from the first of these on, which takes a while to settle.
    _timed_step(t, images)
    first = _timed_step(t, images)
    longest = torch.tensor(first, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=hosts)
    more = MORE_STEPS if longest.item() < SHORT_SECONDS else 0
    return min([first, *(_timed_step(t, images) for _ in range(more))])


def _timed_step(t: Trainer, images: Tensor) -> float:
    _wait_for(t.device)
    began = time.perf_counter()
    _step(t, images)
    _wait_for(t.device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_flops(t: Trainer, images: Tensor) -> float:
    """Floating-point operations of one image, forward and backward, as torch's FlopCounterMode counts them: those of
    convolutions, matrix products and attention, two for a multiply-add. What is frozen takes none for its gradients."""
    # It brings Triton with it, which a run on the CPU does without.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    trained = [parameter for parameter in t.model.parameters() if parameter.requires_grad]
    with counter:
        with autocast(t.config.precision, t.device):
            # Past what torch.compile made of it: of that nothing could be counted.
            out = t.model.forward(images.to(input_type(t.config.precision)))
        # Not `backward`, which DistributedDataParallel would take part in.
        torch.autograd.grad(out.float().sum(), trained)
    return counter.get_total_flops() / len(images)


def _peak_of_all(t: Trainer, hosts: dist.ProcessGroup) -> float:
    """TFLOPS of all GPUs of the run together, NaN where one of them is not known. A collective."""
    first = torch.device(t.device).index or 0
    places = range(first, first + t.shares.devices_a_rank)
    known = [peak_tflops(torch.cuda.get_device_name(place), t.config.precision) for place in places]
    total = torch.tensor(sum(math.nan if one is None else one for one in known), dtype=torch.float64)
    dist.all_reduce(total, group=hosts)
    return total.item()


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
