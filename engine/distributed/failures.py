"""What ended a rank, in one sentence, and which of several failures was the cause of the others."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from engine.runs.events import RankFailed

if TYPE_CHECKING:
    from engine.config.schema import Config

# How torch and the libraries below it say that another rank is gone: a plain RuntimeError comes from gloo.
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER = re.compile(r"connection (reset|closed|refused)|broken pipe|gloo|nccl|socket|timed out", re.I)
# How torch and the libraries below it say that there is no memory to be had.
_GPU_OOM = re.compile(r"CUDA (driver )?error: out of memory|CU\w+_STATUS_ALLOC_FAILED")
_HOST_OOM = re.compile(r"DefaultCPUAllocator: |std::bad_alloc|Cannot allocate memory")
_GIB_PER_UNIT = {"MiB": 2**-10, "GiB": 1.0}


class FinalCheckpointError(Exception):
    """All epochs are done, and what came of them could not be written; the text says why."""


class NonFiniteLossError(Exception):
    """A loss or a gradient is NaN or infinite; the text says where."""


def oom_location(error: BaseException) -> Literal["gpu", "host"] | None:
    """Whose memory an exception found full, if that is what it says."""
    if type(error).__name__ == "OutOfMemoryError" or _GPU_OOM.search(str(error)):
        return "gpu"
    return "host" if isinstance(error, MemoryError) or _HOST_OOM.search(str(error)) else None


def lost_peer(error: BaseException) -> bool:
    """Whether an exception only says that the rank could not reach another one."""
    communicates = type(error).__name__ in _COMMUNICATION_ERRORS and oom_location(error) is None
    return communicates and _LOST_PEER.search(_line_of(error)) is not None


def _line_of(error: BaseException) -> str:
    """The line of an exception's text that says what happened: the last one where a loader process raised it, because
    its traceback comes first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines[0].startswith("Caught ") else lines[0]) if lines else ""


def describe_cause(error: BaseException, config: Config | None = None) -> str:
    """An exception in one sentence; where memory is full, with what to try under `config`."""
    name, text = type(error).__name__, _line_of(error)
    if (where := oom_location(error)) is not None:
        full = (
            f"the GPU's memory is full{_gpu_memory_usage(str(error))}"
            if where == "gpu"
            else "the machine's memory is full"
        )
        told = f"{full}: give a smaller data.batch_size" if config is None else f"{full} {_oom_advice(config, where)}"
        return told if where == "gpu" else f"{told} ({text or name})"
    if type(error).__module__.startswith("engine."):
        return re.sub(r"^engine\.[\w.]+: ", "", text)
    # The store's own text names the key or the number of ranks that it waited for.
    if lost_peer(error) and name != "DistStoreError":
        return f"it lost the connection to another rank ({text})"
    return f"{name}: {text}" if text else name


def _gpu_memory_usage(text: str) -> str:
    """How full, as torch tells it: ` (79.1 of 79.3 GiB in use)`, with what of it other processes have."""
    found = re.search(r"total capacity of ([\d.]+) (\w+) of which ([\d.]+) (\w+) is free", text)
    if found is None or any(unit not in _GIB_PER_UNIT for unit in found.group(2, 4)):
        return ""
    total, free = float(found[1]) * _GIB_PER_UNIT[found[2]], float(found[3]) * _GIB_PER_UNIT[found[4]]
    others = sum(
        float(size) * _GIB_PER_UNIT.get(unit, 0.0)
        for size, unit in re.findall(r"Process \d+ has ([\d.]+) (\w+) memory in use", text)
    )
    also = f", {others:.1f} GiB of them by other processes" if others >= 0.05 * total else ""
    return f" ({total - free:.1f} of {total:.1f} GiB in use{also})"


def _oom_advice(config: Config, location: Literal["gpu", "host"]) -> str:
    images, device, optim = config.data.numeric_batch_size, config.device, config.optim
    advice = []
    if images > 1:
        again = "" if device.static_graph else f" with optim.accumulate={2 * optim.accumulate}"
        advice.append(f"data.batch_size={images // 2}{again}")
    if location == "gpu" and config.precision.amp in ("off", "O0"):
        advice.append("precision.amp=fp16" if device.parallel == "dp" else "precision.amp=bf16")
    if location == "host":
        advice += ["fewer data.workers"] + (["fewer device.ranks"] if device.ranks > 1 else [])
    advice.append("--batch-size auto" if images > 1 else "a smaller data.image_size or another model.name")
    many = "image" if images == 1 else "images"
    tried = f"{', '.join(advice[:-1])}, or {advice[-1]}" if len(advice) > 1 else advice[0]
    return f"at {images} {many} a {'GPU' if device.parallel == 'dp' else 'rank'}: try {tried}"


def rank_failure(rank: int, device: str, error: BaseException, config: Config | None = None) -> RankFailed:
    """Of the error that is being handled."""
    return RankFailed(
        rank=rank,
        device=device,
        cause=describe_cause(error, config),
        traceback=traceback.format_exc(),
        repeats=isinstance(error, NonFiniteLossError | FinalCheckpointError),
        lost_peer=lost_peer(error),
    )


def describe_failure(failure: RankFailed) -> str:
    return f"rank {failure.rank} ({failure.device}) failed: {failure.cause}"


def root_cause(failures: Sequence[RankFailed]) -> RankFailed:
    """The earliest failure that is not merely the loss of another rank, or else the earliest of all."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time))
