"""torch.compile: compile a model in place and run partial batches eagerly."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from engine.config.schema import Config
from engine.utils.errors import UsageError
from engine.utils.files import make_user_folder


def compile_in_place(model: nn.Module, config: Config) -> None:
    """Compile the model's forward on its first call. Parameter names stay the same, and a deep copy is not compiled.
    Under DDP the graph is split so that gradients are reduced during the backward pass (torch's DDPOptimizer)."""
    if config.model.compile:
        import torch._dynamo.config as dynamo

        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_compile_cache_folder()))
        # Beyond its limit torch would run further image sizes eagerly.
        dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * (len(config.data.epoch_sizes) + 1))
        model.compile(mode=config.model.compile_mode, dynamic=False)


def _compile_cache_folder() -> Path:
    """Return a folder for compiled code that no other user can write to: torch's default one, or a new one.

    torch runs the code that it finds in its default folder, which any user can create in /tmp.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    try:
        return make_user_folder(Path(default_cache_dir()))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="torchinductor_"))


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

    if not isinstance(error, TorchDynamoException):
        return None
    cause = getattr(error, "inner_exception", error)
    why = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
    return UsageError.one(
        "model.compile", f"torch.compile cannot compile {config.model.name} here ({why}); set model.compile=false"
    )


def stop_compile_workers() -> None:
    """End torch's compile worker processes; nothing is compiled after warmup."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
