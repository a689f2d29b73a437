"""Steps that are thrown away, before the first: they settle how gradients are sent, show whether the model can train as
the config wants it, and what a step costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.distributed.parallel import images_to_try
from engine.gpus.peak_flops import peak_tflops
from engine.models.compile import end_compilers, refused
from engine.models.freeze import set_training
from engine.models.precision import autocast, input_type
from engine.runs.events import Warned
from engine.training.rank_state import Trainer
from engine.training.rng import rng_state, set_rng_state
from engine.utils.errors import Problem, UsageError
from engine.utils.text import counted

# A step that is as short as this is timed so many times more: something else may come between.
SHORT_SECONDS, MORE_STEPS = 0.01, 8
# CUDA graphs are recorded in the second, and replayed from the third on.
COMPILED_STEPS = 3


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
    """Forward and back, with the model's state put back after it; and all of the compiling, where the model is to be
    compiled. Raises UsageError where the model cannot. Also a collective on `hosts`, a group for what lies in host
    memory.

    DDP sorts its gradient buckets anew after the first backward, which changes the order of additions: a resumed run
    would differ from an uninterrupted one if the first real step were the first of all.
    """
    buffers = {name: buffer.clone() for name, buffer in t.model.named_buffers()}
    rng_before = rng_state(t.device)
    set_training(t.model, t.frozen)
    count = images_to_try(t.shares)
    try:
        _step(t, count)
    except (ValueError, RuntimeError) as error:
        if t.config.model.compile and (refusal := refused(t.config, error)) is not None:
            raise refusal from error
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
    seconds = _least_seconds(t, count, hosts)
    flops, peak = (count_flops(t, count), _peak_of_all(t, hosts)) if t.device.type == "cuda" else (math.nan, math.nan)
    if t.config.model.compile:
        _compile(t)
        set_training(t.model, t.frozen)
    t.forget_gradients()
    with torch.no_grad():
        for name, buffer in t.model.named_buffers():
            buffer.copy_(buffers[name])
    set_rng_state(rng_before, t.device)
    return Tried(seconds, count, flops, peak)


def _step(t: Trainer, count: int) -> None:
    _forward(t, t.wrapped, count).float().sum().backward()


def _least_seconds(t: Trainer, count: int, hosts: dist.ProcessGroup) -> float:
    """A collective also on `hosts`."""
    # Gradients are sent in another order from the first of these on, which takes a while to settle.
    _timed_step(t, count)
    first = _timed_step(t, count)
    longest = torch.tensor(first, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=hosts)
    more = MORE_STEPS if longest.item() < SHORT_SECONDS else 0
    return min([first, *(_timed_step(t, count) for _ in range(more))])


def _timed_step(t: Trainer, count: int) -> float:
    _wait_for(t.device)
    began = time.perf_counter()
    _step(t, count)
    _wait_for(t.device)
    return time.perf_counter() - began


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_flops(t: Trainer, count: int) -> float:
    """Floating-point operations of one image, forward and backward, as torch's FlopCounterMode counts them: those of
    convolutions, matrix products and attention, two for a multiply-add. What is frozen takes none for its gradients."""
    # It brings Triton with it, which a run on the CPU does without.
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    trained = [parameter for parameter in t.model.parameters() if parameter.requires_grad]
    with counter:
        # Past what torch.compile made of it: of that nothing could be counted.
        out = _forward(t, t.model.forward, count)
        # Not `backward`, which DistributedDataParallel would take part in.
        torch.autograd.grad(out.float().sum(), trained)
    return counter.get_total_flops() / count


def _peak_of_all(t: Trainer, hosts: dist.ProcessGroup) -> float:
    """TFLOPS of all GPUs of the run together, NaN where one of them is not known. A collective."""
    first = torch.device(t.device).index or 0
    places = range(first, first + t.shares.devices_a_rank)
    known = [peak_tflops(torch.cuda.get_device_name(place), t.config.precision) for place in places]
    total = torch.tensor(sum(math.nan if one is None else one for one in known), dtype=torch.float64)
    dist.all_reduce(total, group=hosts)
    return total.item()


def _forward(t: Trainer, model: Callable[[Tensor], Tensor], count: int) -> Tensor:
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
