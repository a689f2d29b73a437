"""Describe the failure of a rank in one sentence with advice, and find the root cause of several failures.

Ranks create `RankFailed` events here; `engine.jobs.launch` selects and reports the root cause.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from engine.base.errors import CodedError, Problem, UsageError
from engine.runs.events import RankFailed
from engine.train.distributed.cuda_errors import find_known_error, nccl_last_error, shorten
from engine.train.distributed.watchdog import Heartbeat, lagging_ranks

if TYPE_CHECKING:
    from engine.config.schema import Config

# Exceptions of torch.distributed when another rank is gone; gloo raises a plain RuntimeError.
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER = re.compile(
    r"connection (reset|closed|refused)|broken pipe|gloo|socket(?! has failed to listen)|timed out"
    r"|communicator was aborted|remote process exited|watchdog caught collective operation timeout"
    # A key of the store that another rank should have set, for example NCCL's unique ID of rank 0.
    r"|wait timeout|timeout waiting for key|retrieving ncclUniqueId",
    re.IGNORECASE,
)
# "Connection timed out" is an error of TCP: the network failed, and no rank is late.
_TIMED_OUT = re.compile(r"(?<!connection )timed out|timeout", re.IGNORECASE)
# Out-of-memory errors of CUDA libraries and of the host allocator, which are plain RuntimeErrors. Up to torch 2.11, the
# allocator fails with an assertion where NVML does not list processes, which its message would name (WSL 2, MIG).
_GPU_OOM = re.compile(
    r"CUDA (driver )?error: out of memory|Cuda failure.*'out of memory'|CU\w+_STATUS_ALLOC_FAILED"
    r"|NVML_SUCCESS == .*CUDACachingAllocator\.cpp"
)
# A library that finds no memory for its first allocation reports this, but so does a broken installation.
_PROBABLE_GPU_OOM = re.compile(r"CU\w+_STATUS_NOT_INITIALIZED")
_HOST_OOM = re.compile(r"DefaultCPUAllocator: |std::bad_alloc|Cannot allocate memory")
_GIB_PER_UNIT = {"MiB": 2**-10, "GiB": 1.0}


class FinalCheckpointError(CodedError):
    """Training is complete, but its last checkpoint could not be written. The message says why."""

    code = "not-writable"


class NonFiniteLossError(CodedError):
    """A loss or gradient is NaN or infinite. The message names step and rank."""

    code = "non-finite"


def oom_location(error: BaseException) -> Literal["gpu", "host"] | None:
    """Return which memory ran out according to an exception: gpu, host, or None for any other error."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or _GPU_OOM.search(text) or _PROBABLE_GPU_OOM.search(text):
        return "gpu"
    if isinstance(error, MemoryError):
        return "host"
    return "host" if _HOST_OOM.search(text) and _known_error(error) is None else None


def lost_peer(error: BaseException) -> bool:
    """Whether an exception only means that another rank failed, hangs or is unreachable."""
    communicates = type(error).__name__ in _COMMUNICATION_ERRORS
    if not communicates or _known_error(error) is not None or oom_location(error) is not None:
        return False
    return _LOST_PEER.search(_line_of(error)) is not None or "ncclRemoteError" in str(error)


def timed_out(error: BaseException) -> bool:
    """Whether an exception only means that another rank did not take part in time."""
    return lost_peer(error) and _TIMED_OUT.search(_line_of(error)) is not None


def _known_error(error: BaseException) -> Problem | None:
    """Return cause and remedy of an exception of torch that CUDA, NCCL or the driver has caused, else None."""
    return find_known_error(str(error)) if isinstance(error, RuntimeError) else None


def _line_of(error: BaseException) -> str:
    """Return the line of an exception's text that says what happened.

    It is the first one, the one after "Last error:" of an exception of NCCL, or the last one of an exception that a
    DataLoader worker re-raised after its traceback.
    """
    if (last_error := nccl_last_error(str(error))) is not None:
        return last_error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines[0].startswith("Caught ") else lines[0]) if lines else ""


def find_cause(error: BaseException, config: Config | None = None) -> Problem:
    """Return the cause of a rank's failure as one sentence with a code.

    With the `config` of the run, advise changes to it for an out-of-memory error, and name the line of user code that
    raised any other."""
    name, text = type(error).__name__, _line_of(error)
    if (location := oom_location(error)) is not None:
        return _describe_oom(error, location, config)
    if type(error).__module__.startswith("engine."):
        return Problem("", re.sub(r"^engine\.[\w.]+: ", "", text), code=_code_of(error))
    if (known := _known_error(error)) is not None:
        return known
    # The text of a DistStoreError already names the missing ranks or the key.
    if timed_out(error) and name != "DistStoreError":
        reason = f"it waited too long for another rank ({text}); that rank hangs or is unreachable, see the log"
        return Problem("", reason, code="timed-out")
    if lost_peer(error) and name != "DistStoreError":
        reason = (
            f"it lost the connection to another rank ({text}); that rank failed or is unreachable, see the log for its "
            "error"
        )
        return Problem("", reason, code="connection-failed")
    place = ""
    if config is not None:
        # Imported here because it imports pydantic, which the watcher of messages does not need.
        from engine.config.user_code import locate_in_user_code

        place = locate_in_user_code(error, config)
    code = "timed-out" if timed_out(error) else "connection-failed" if lost_peer(error) else "rank-failed"
    return Problem("", f"{name}: {text}{place}" if text else f"{name}{place}", code=code)


def has_known_cause(error: BaseException) -> bool:
    """Whether the cause is outside of the model's code: no memory left, another rank, or the GPU and its driver."""
    return oom_location(error) is not None or lost_peer(error) or _known_error(error) is not None


def _code_of(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return next((problem.code for problem in error.problems), "rank-failed")
    return error.code if isinstance(error, CodedError) else "rank-failed"


def _describe_oom(error: BaseException, location: Literal["gpu", "host"], config: Config | None) -> Problem:
    """Describe an out-of-memory error, and advise changes to `config`."""
    text = str(error)
    advice = ": reduce data.batch_size" if config is None else f" {_oom_advice(config, location)}"
    if location == "host":
        reason = f"the host is out of memory{advice} ({_line_of(error) or type(error).__name__})"
        return Problem("", reason, code="out-of-memory")
    if _PROBABLE_GPU_OOM.search(text):
        reason = f"the GPU is probably out of memory{advice} ({shorten(_line_of(error))})"
        return Problem("", reason, code="out-of-memory")
    return Problem("", f"the GPU is out of memory{_gpu_memory_usage(text)}{advice}", code="out-of-memory")


def _gpu_memory_usage(text: str) -> str:
    """Return ` (79.1 of 79.3 GiB in use)` from the text of a torch.OutOfMemoryError, with the share of other
    processes."""
    match = re.search(r"total capacity of ([\d.]+) (\w+) of which ([\d.]+) (\w+) is free", text)
    if match is None or any(unit not in _GIB_PER_UNIT for unit in match.group(2, 4)):
        return ""
    total_gib, free_gib = float(match[1]) * _GIB_PER_UNIT[match[2]], float(match[3]) * _GIB_PER_UNIT[match[4]]
    other_gib = sum(
        float(size) * _GIB_PER_UNIT.get(unit, 0.0)
        for size, unit in re.findall(r"Process \d+ has ([\d.]+) (\w+) memory in use", text)
    )
    other_processes = f", {other_gib:.1f} GiB of it by other processes" if other_gib >= 0.05 * total_gib else ""
    return f" ({total_gib - free_gib:.1f} of {total_gib:.1f} GiB in use{other_processes})"


def _oom_advice(config: Config, location: Literal["gpu", "host"]) -> str:
    """Return the batch size that ran out of memory, and settings to try."""
    images, device, optim = config.data.numeric_batch_size, config.device, config.optim
    advice = []
    if images > 1:
        accumulate = "" if device.static_graph else f" with optim.accumulate={2 * optim.accumulate}"
        advice.append(f"data.batch_size={images // 2}{accumulate}")
    if location == "gpu" and config.precision.amp in ("off", "O0"):
        advice.append("precision.amp=fp16" if device.parallel == "dp" else "precision.amp=bf16")
    if location == "host":
        advice += ["fewer data.workers"] + (["fewer device.ranks"] if device.ranks > 1 else [])
    advice.append("--batch-size auto" if images > 1 else "a smaller data.image_size or another model.name")
    noun = "image" if images == 1 else "images"
    alternatives = f"{', '.join(advice[:-1])}, or {advice[-1]}" if len(advice) > 1 else advice[0]
    return f"with {images} {noun} per {'GPU' if device.parallel == 'dp' else 'rank'}: try {alternatives}"


def rank_failure(rank: int, device: str, error: BaseException, config: Config | None = None) -> RankFailed:
    """Return the event for the exception that is being handled, with its traceback."""
    cause = find_cause(error, config)
    return RankFailed(
        rank=rank,
        device=device,
        cause=cause.reason,
        code=cause.code,
        traceback=traceback.format_exc(),
        repeats=isinstance(error, NonFiniteLossError | FinalCheckpointError),
        lost_peer=lost_peer(error),
        timed_out=timed_out(error),
    )


def describe_failure(failure: RankFailed) -> str:
    """Return the failure as one sentence that names the rank, its device and the cause."""
    return f"rank {failure.rank} ({failure.device}) failed: {failure.cause}"


def late_ranks(failures: Mapping[int, RankFailed], heartbeats: Sequence[Heartbeat]) -> list[int]:
    """Return the ranks that others waited for until a collective timed out; none if a rank failed for another reason.

    `failures` are those of the ranks that have reported one."""
    timed_out_ranks = [rank for rank, failure in failures.items() if failure.timed_out]
    if not timed_out_ranks or not all(failure.lost_peer for failure in failures.values()):
        return []
    late = [rank for rank in lagging_ranks(dict(enumerate(heartbeats))) if rank not in timed_out_ranks]
    # A rank that has lost its connection is late only if no rank hangs.
    return [rank for rank in late if rank not in failures] or late


def root_cause(failures: Sequence[RankFailed]) -> RankFailed:
    """Return the earliest failure that no other rank has caused, or else the earliest one."""
    return min(failures, key=lambda failure: (failure.lost_peer, failure.time))
