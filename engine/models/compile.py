"""torch.compile: a model compiled in place, for whole batches alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from engine.config.schema import Config
from engine.utils.errors import UsageError


def compile_in_place(model: nn.Module, config: Config) -> None:
    """From here on a call of the model runs what its first call compiles. Names stay as they are; a copy of the model
    is not compiled. Where DDP calls the model it is compiled in parts, so that gradients are sent while others are
    computed (torch's DDPOptimizer)."""
    if config.model.compile:
        model.compile(mode=config.model.compile_mode, dynamic=False)


def eager_for_partial_batch(config: Config, num_images: int, full_batch_size: int) -> AbstractContextManager[object]:
    """In it the model runs compiled for `full_batch_size` images, and as it was written for any other number of them:
    the last batch of an epoch is worth neither another compilation nor slower code for all."""
    if not config.model.compile or num_images == full_batch_size:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def compile_usage_error(config: Config, error: Exception) -> UsageError | None:
    """What an error of torch.compile's own says of the config; None for any other."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    cause = getattr(error, "inner_exception", error)
    why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    return UsageError.one(
        "model.compile", f"torch.compile cannot compile {config.model.name} here ({why}); leave model.compile out"
    )


def stop_compile_workers() -> None:
    """The processes that compiled in parallel; nothing is compiled after the warm-up."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
