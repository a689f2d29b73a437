"""torch.compile: compile a model in place, keep the compiled code between runs, and run partial batches eagerly."""

from __future__ import annotations

import os
import platform
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.schema import Config
from engine.models.compile_cache import (
    CompileCacheError,
    CompiledCode,
    cache_key,
    cache_path,
    load_compiled_code,
    read_libraries,
    save_compiled_code,
    write_libraries,
)
from engine.utils.errors import Problem, UsageError
from engine.utils.files import make_user_folder
from engine.utils.host import CPU_INFO, CPU_INFO_BYTES

COMPILE_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# The same folder if this module has chosen it, and not the user.
OWN_FOLDER_VARIABLE = "GPUTRAIN_COMPILE_FOLDER"


def compile_in_place(model: nn.Module, config: Config) -> None:
    """Compile the model's forward on its first call. Parameter names stay the same, and a deep copy is not compiled.
    Under DDP the graph is split so that gradients are reduced during the backward pass (torch's DDPOptimizer)."""
    if config.model.compile:
        # Now, because torch sets the variable to its default when its compiler is imported.
        if COMPILE_FOLDER_VARIABLE not in os.environ:
            os.environ[COMPILE_FOLDER_VARIABLE] = os.environ[OWN_FOLDER_VARIABLE] = str(_compile_folder())

        def forward(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)

        # What `model.compile()` does, but up to torch 2.13 it runs nn.Sequential eagerly, because Dynamo skips the
        # frames of torch.nn. torch drops the attribute from copies.
        model._compiled_call_impl = torch.compile(forward, mode=config.model.compile_mode, dynamic=False)


def allow_compilations(image_sizes: int) -> None:
    """Let torch compile a model for training and evaluation at this number of image sizes.

    Beyond its limit, 8, torch would run further sizes eagerly."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * image_sizes)


class CompileCache:
    """The compiled code of a run: that of an earlier run with the same key, or what this one compiles.

    `shapes` is what the graphs depend on besides the config, such as the size of the images. Each key has its own
    compile folder, so that all libraries in it are those of the key. If the user has set TORCHINDUCTOR_CACHE_DIR, torch
    keeps its code there, and this class does nothing. `problem` is about a file that is not used.
    """

    def __init__(self, config: Config, device: torch.device, shapes: dict[str, Any]) -> None:
        self._key = cache_key({**_code_parts(config), **_host_parts(device), **shapes})
        self._folder: Path | None = None
        self._misses = 0
        self.loaded = False
        self.problem: Problem | None = None

    def load(self) -> None:
        """Set torch's compile folder, and restore the code of an earlier run. Call it before the first compilation."""
        parent = os.environ.get(OWN_FOLDER_VARIABLE)
        if parent is None or os.environ[COMPILE_FOLDER_VARIABLE] != parent:
            return
        self._misses = _compiled_graphs()
        try:
            self._folder = make_user_folder(Path(parent), self._key)
            os.environ[COMPILE_FOLDER_VARIABLE] = str(self._folder)
            code = load_compiled_code(self._key)
            if code is None:
                return
            write_libraries(self._folder, code.libraries)
            if torch.compiler.load_cache_artifacts(code.artifacts) is None:
                raise CompileCacheError("is damaged: torch cannot read its artifacts", code="damaged")
        except (CompileCacheError, OSError) as error:
            self.problem = self._warning(error, "the model is compiled again")
            return
        self.loaded = True
        _skip_precompiled_headers()

    def save(self) -> None:
        """Keep what this run has compiled, unless all of it was loaded. Sets `problem` if it cannot be kept."""
        if self._folder is None or (self.loaded and _compiled_graphs() == self._misses):
            return
        try:
            artifacts = torch.compiler.save_cache_artifacts()
            if artifacts is not None:
                save_compiled_code(self._key, CompiledCode(artifacts[0], read_libraries(self._folder)))
        except (CompileCacheError, OSError) as error:
            self.problem = self._warning(error, "the next run compiles again")

    def _warning(self, error: CompileCacheError | OSError, effect: str) -> Problem:
        code = error.code if isinstance(error, CompileCacheError) else "not-readable"
        return Problem("", f"the compiled code in {cache_path(self._key)} {error}; {effect}", code=code)


def _code_parts(config: Config) -> dict[str, Any]:
    """Return the part of a config that the compiled code depends on."""
    device = config.device
    return {
        "model": config.model.model_dump(mode="json", exclude={"weights", "min_match", "ema", "init", "init_std"}),
        "precision": config.precision.model_dump(mode="json"),
        "device": [
            *(device.deterministic, device.parallel, device.bucket_view, device.bucket_cap_mb, device.static_graph),
        ],
    }


def _host_parts(device: torch.device) -> dict[str, Any]:
    """Return the versions and the processor that the compiled code depends on."""
    parts: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        return parts | {"gpu": torch.cuda.get_device_name(device), "arch": torch.cuda.get_device_capability(device)}
    cpu = ""
    with suppress(OSError), CPU_INFO.open(errors="replace") as file:
        lines = file.read(CPU_INFO_BYTES).splitlines()
        cpu = "".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
    return parts | {"cpu": cpu, "instructions": torch.backends.cpu.get_cpu_capability()}


def _compile_folder() -> Path:
    """Return a folder for compiled code that no other user can write to: torch's default one, or a new one.

    torch runs the code that it finds in its default folder, which any user can create in /tmp.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    try:
        return make_user_folder(Path(default_cache_dir()))
    except OSError:
        from torch._inductor import config as inductor_config

        # torch keeps its precompiled header in the default folder whatever the variable says.
        inductor_config.cpp_cache_precompile_headers = False
        return Path(tempfile.mkdtemp(prefix="torchinductor_"))


def _compiled_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process because its cache did not have them."""
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def _skip_precompiled_headers() -> None:
    """Keep torch from precompiling a header, which takes 8 s, for libraries that are there already.

    It speeds up their compilation, and torch 2.15 does it before it looks for them, also in a folder that was wiped.
    """
    from torch._inductor import codecache

    if hasattr(codecache, "_precompile_header"):
        setattr(codecache, "_precompile_header", lambda *_, **__: "")  # noqa: B010 - mypy compares the types


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
