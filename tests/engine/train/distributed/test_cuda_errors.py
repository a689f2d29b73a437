"""The sentence for real messages of torch, CUDA and NCCL, each with the public issue that reports it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from engine.config.loader import resolve_config
from engine.train.distributed.cuda_errors import MAX_MESSAGE_CHARS
from engine.train.distributed.failures import find_cause, lost_peer, oom_location
from support.messages import has_problem

KERNEL_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)

REMOTE_ERROR = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."


def nccl(kind: str, class_line: str, last_error: str) -> Exception:
    """Return an exception of ProcessGroupNCCL: its headline, NCCL's class of errors, and NCCL's last error."""
    headline = f"NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {kind}, NCCL version 2.21.5"
    return dist.DistBackendError(f"{headline}\n{class_line}\nLast error:\n{last_error}")


def unhandled_system_error(last_error: str) -> Exception:
    class_line = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. "
    return nccl("unhandled system error (run with NCCL_DEBUG=INFO for details)", class_line, last_error)


def unhandled_cuda_error(last_error: str) -> Exception:
    class_line = "ncclUnhandledCudaError: Call to CUDA function failed."
    return nccl("unhandled cuda error (run with NCCL_DEBUG=INFO for details)", class_line, last_error)


def cuda(message: str) -> Exception:
    return RuntimeError(f"CUDA error: {message}{KERNEL_ADVICE}")


@pytest.mark.parametrize(
    ("error", "code", "values"),
    [
        pytest.param(
            unhandled_system_error("Error while creating shared memory segment /dev/shm/nccl-pZafXL (size 7340384)"),
            "shm-full",
            ["--shm-size=1g", "--ipc=host"],
            id="fal-ai-community/video-diffusion-speedrun#2",
        ),
        pytest.param(
            nccl(
                "internal error - please report this issue to the NCCL developers",
                "ncclInternalError: Internal check failed.",
                "Bootstrap : no socket interface found",
            ),
            "connection-failed",
            ["NCCL_SOCKET_IFNAME"],
            id="EvolvingLMMs-Lab/open-r1-multimodal#7",
        ),
        pytest.param(
            unhandled_cuda_error("Cuda failure 217 'peer access is not supported between these two devices'"),
            "not-supported",
            ["NCCL_P2P_DISABLE=1"],
            id="hiyouga/EasyR1#579",
        ),
        pytest.param(
            RuntimeError(
                "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
                "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
                "Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled with "
                "your version of the CUDA driver."
            ),
            "wrong-version",
            ["nvidia-smi"],
            id="lllyasviel/Fooocus#1313",
        ),
        pytest.param(
            RuntimeError(
                "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
                "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized"
            ),
            "driver-unavailable",
            ["nvidia-fabricmanager"],
            id="haotian-liu/LLaVA#683",
        ),
        pytest.param(
            cuda("uncorrectable ECC error encountered"),
            "gpu-memory-errors",
            ["ECC", "dmesg"],
            id="zai-org/ChatGLM3#681",
        ),
        pytest.param(
            cuda("CUDA-capable device(s) is/are busy or unavailable"),
            "gpu-in-use",
            ["nvidia-smi --compute-mode=DEFAULT"],
            id="modelscope/ms-swift#5118",
        ),
        pytest.param(
            cuda("device-side assert triggered"),
            "bad-label",
            ["device.gpus=cpu"],
            id="milesial/Pytorch-UNet#375",
        ),
    ],
)
def test_cause_of_known_error_names_cause_and_remedy(error: Exception, code: str, values: list[str]) -> None:
    cause = find_cause(error)
    assert has_problem([cause], code, "", *values)
    assert "\n" not in str(cause)
    assert not lost_peer(error), "the rank itself failed"
    assert oom_location(error) is None


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(unhandled_cuda_error("Cuda failure 2 'out of memory'"), id="NCCL"),
        pytest.param(unhandled_cuda_error("Cuda failure 'out of memory'"), id="NCCL 2.18"),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            id="cuBLAS without memory",
        ),
        pytest.param(
            RuntimeError(
                'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165'
            ),
            id="NVML without process list, torch 2.11",
        ),
        pytest.param(
            RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
            id="QwenLM/Qwen#120",
        ),
        pytest.param(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), id="cuDNN"),
    ],
)
def test_cause_of_full_gpu_memory_advises_smaller_batch(error: Exception) -> None:
    cause = find_cause(error, resolve_config(None, ["data.batch_size=64"]).config)
    assert has_problem([cause], "out-of-memory", "", "64", "data.batch_size=32")
    assert oom_location(error) == "gpu"
    assert not lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            nccl(
                "remote process exited or there was a network error",
                REMOTE_ERROR,
                "socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer",
            ),
            id="NVIDIA/nccl#2076",
        ),
        pytest.param(
            nccl(
                "remote process exited or there was a network error",
                REMOTE_ERROR,
                "NET/IB : Got completion from peer 11.214.147.122<39138> with error 12, opcode 0, len 0",
            ),
            id="tatsu-lab/stanford_alpaca#207",
        ),
    ],
)
def test_nccl_error_of_a_lost_rank_is_a_lost_peer(error: Exception) -> None:
    assert lost_peer(error)
    assert find_cause(error).code == "connection-failed"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no kernel image is available"),
        RuntimeError("illegal instruction in the parser"),
        RuntimeError("Device or resource busy or unavailable"),
    ],
    ids=lambda error: str(error),
)
def test_known_words_in_an_exception_of_user_code_are_not_a_cuda_error(error: Exception) -> None:
    assert find_cause(error).reason == f"{type(error).__name__}: {error}"


def test_known_words_in_an_exception_of_a_dataloader_worker_are_not_a_cuda_error() -> None:
    traceback = 'Original Traceback (most recent call last):\n  File "/opt/cuda/parser.py", line 7, in parse'
    error = RuntimeError(
        f"Caught RuntimeError in DataLoader worker process 0.\n{traceback}\nRuntimeError: illegal instruction"
    )
    assert find_cause(error).reason == "RuntimeError: RuntimeError: illegal instruction"


def test_cause_of_known_error_quotes_a_short_line() -> None:
    described = find_cause(RuntimeError("CUDA error: device-side assert triggered " + "x" * 1000)).reason
    assert described.endswith("…)")
    assert len(described) < 2 * MAX_MESSAGE_CHARS + 100
