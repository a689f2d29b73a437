"""torch.compile: compile a model in place, keep its code in a private folder, and run partial batches eagerly."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from engine.base.errors import UsageError
from engine.base.files import cache_folder, make_user_folder
from engine.config.schema import Config

COMPILE_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Below the user's cache folder.
COMPILE_FOLDER = "compiled"


def compile_in_place(model: nn.Module, config: Config) -> None:
    """Compile the model's forward on its first call. Parameter names stay the same, and a deep copy is not compiled.
    Under DDP the graph is split so that gradients are reduced during the backward pass (torch's DDPOptimizer)."""
    if config.model.compile:
        _use_private_folder()

        def forward(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

        # What `model.compile()` does, but up to torch 2.13 it runs nn.Sequential eagerly, because Dynamo skips the
        # frames of torch.nn. torch drops the attribute from copies.
        model._compiled_call_impl = torch.compile(forward, mode=config.model.compile_mode, dynamic=False)


def _use_private_folder() -> None:
    """Let torch keep compiled code, which it runs again, where no other user can write; unless the user has set where.

    torch's default folder is in /tmp, where any user can create it. Call it before torch's compiler is imported, which
    sets the variable to that folder."""
    if COMPILE_FOLDER_VARIABLE in os.environ:
        return
    try:
        folder = str(make_user_folder(cache_folder(), COMPILE_FOLDER))
    except OSError:
        folder = tempfile.mkdtemp(prefix="torchinductor_")
    os.environ[COMPILE_FOLDER_VARIABLE] = folder
    # No public name, and no variable: torch keeps its precompiled header in the default folder whatever folder is set.
    from torch._inductor import config as inductor_config

    inductor_config.cpp_cache_precompile_headers = False


def allow_compilations(image_sizes: int) -> None:
    """Let torch compile a model for training and evaluation at this number of image sizes.

    Beyond its limit, 8, torch would run further sizes eagerly."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * image_sizes)


def eager_for_partial_batch(config: Config, num_images: int, full_batch_size: int) -> AbstractContextManager[object]:
    """Run the model eagerly inside the context if the batch is partial: the last batch of an epoch is not worth another
    compilation or a slower dynamic graph."""
    if not config.model.compile or num_images == full_batch_size:
        return nullcontext()
    eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def compile_usage_error(config: Config, error: Exception) -> UsageError | None:
    """Return a UsageError for an error raised by torch.compile, None for any other error."""
    from torch._dynamo.exc import TorchDynamoException

    # Dynamo wraps errors of inductor, except those of the backward pass, which autograd compiles.
    if not isinstance(error, TorchDynamoException) and not type(error).__module__.startswith("torch._inductor."):
        return None
    cause = getattr(error, "inner_exception", error)
    why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    return UsageError.one(
        "model.compile",
        f"torch.compile cannot compile {config.model.name} here ({why}); set model.compile=false",
        code="library-failed",
    )


def stop_compile_workers() -> None:
    """End torch's compile worker processes; nothing is compiled after warmup."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
