"""Checks of Python, torch and torchvision, and of their compatibility with the driver and the GPUs."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from engine.doctor.check import Check
from engine.gpus.snapshot import Snapshot
from engine.utils.codec import Count, Record, field
from engine.utils.libraries import installed_version
from engine.utils.text import pluralize

TORCHVISION_ADVICE = (
    "install both from the same index: `pip install --force-reinstall torch torchvision`, or for the CPU "
    "`uv pip install --reinstall --torch-backend cpu torch torchvision`"
)
TORCH_BUILD_ADVICE = "install a build of torch for this driver (https://pytorch.org/get-started), or a newer driver"


class TorchInfo(Record, frozen=True, kw_only=True):
    """The versions of torch, of its CUDA and NCCL, and of torchvision; None or False for what is missing.

    `errors` says why a library cannot be imported."""

    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    torchvision: str | None = None
    errors: dict[str, str] = field(default_factory=dict)


class CudaGpu(Record, frozen=True, kw_only=True):
    """A GPU as torch sees it, with its compute capability."""

    uuid: str
    name: str
    capability: tuple[Count, Count]


class CudaInfo(Record, frozen=True, kw_only=True):
    """The GPUs that torch can initialize, and the architectures that it has kernels for; or the `error`."""

    gpus: tuple[CudaGpu, ...] = ()
    kernels: tuple[str, ...] = ()
    error: str | None = None


def python_check() -> Check:
    return Check("torch", "gputrain", "ok", f"{version('gputrain')} on Python {platform.python_version()}")


def no_training_check(reason: str) -> Check:
    """Report that this installation does not train. It still monitors GPUs, and lists and compares runs."""
    found = "this installation does not train; it monitors GPUs, and lists and compares runs"
    return Check("torch", "training", "warning", found, reason, code="not-installed")


def installed_versions() -> str:
    """Return the installed versions of torch and torchvision, without importing them."""
    versions = {name: installed_version(name) for name in ("torch", "torchvision")}
    return " and ".join(f"{name} {number}" if number else f"no {name}" for name, number in versions.items())


def no_answer_check(name: str, reason: str) -> Check:
    """Report that the helper process that imports torch failed or hangs."""
    advice = "run `python -c 'import torch, torchvision; torch.cuda.init()'` to see where it hangs or fails"
    return Check("torch", name, "problem", f"{installed_versions()}: {reason}", advice, code="library-failed")


def torch_checks(torch_info: TorchInfo) -> Iterator[Check]:
    """Check that torch and torchvision import; `torch_info` is the answer of `engine.doctor.probe`."""
    for name, error in torch_info.errors.items():
        found = f"{name} cannot be imported ({installed_versions()}): {error}"
        yield Check("torch", name, "problem", found, TORCHVISION_ADVICE, code="library-failed")
    if "torch" in torch_info.errors:
        return
    if not torch_info.errors:
        yield Check(
            "torch",
            "torch",
            "ok",
            f"{torch_info.torch}, works with torchvision {torch_info.torchvision}",
        )


def compatibility_checks(
    torch_info: TorchInfo, cuda_info: CudaInfo, snapshot: Snapshot | None, visible_gpus: int
) -> Iterator[Check]:
    """Check that torch can use the GPUs of the driver; `visible_gpus` is how many CUDA_VISIBLE_DEVICES shows."""
    torch_cuda = torch_info.cuda
    gpus = 0 if snapshot is None else len(snapshot.gpus)
    if torch_cuda is None:
        found = f"torch {torch_info.torch} is built without CUDA"
        if gpus == 0:
            yield Check("torch", "CUDA", "ok", f"{found}, and this host has no NVIDIA GPU")
        else:
            yield Check(
                "torch",
                "CUDA",
                "problem",
                f"{found}, but this host has {pluralize(gpus, 'GPU')}",
                TORCH_BUILD_ADVICE,
                code="wrong-version",
            )
        return
    if gpus == 0 or snapshot is None:
        yield Check("torch", "CUDA", "ok", f"torch is built for CUDA {torch_cuda}, and this host has no NVIDIA GPU")
    else:
        yield cuda_check(torch_cuda, snapshot.cuda.value, cuda_info.error if visible_gpus else None)
    yield from arch_checks(cuda_info.gpus, cuda_info.kernels)
    if torch_info.nccl is not None:
        yield Check("torch", "NCCL", "ok", f"version {torch_info.nccl}, bundled with torch")
    elif gpus > 1:
        yield Check(
            "torch",
            "NCCL",
            "problem",
            "this build of torch has no NCCL backend",
            "install torch from PyPI",
            code="wrong-version",
        )


def cuda_check(torch_cuda: str, driver_cuda: str | None, error: str | None) -> Check:
    """Check that the driver supports the CUDA version of torch: its own major version, and older ones."""
    found = f"torch is built for CUDA {torch_cuda}, and the driver supports {driver_cuda or 'an unknown version'}"
    if driver_cuda is not None and _major_version(torch_cuda) > _major_version(driver_cuda):
        return Check("torch", "CUDA", "problem", f"{found}, which is too old", TORCH_BUILD_ADVICE, code="wrong-version")
    if error is not None:
        advice = f"{TORCH_BUILD_ADVICE}; in a container, start it with `--gpus all`"
        return Check(
            "torch",
            "CUDA",
            "problem",
            f"{found}, but torch cannot initialize it: {error}",
            advice,
            code="library-failed",
        )
    return Check("torch", "CUDA", "ok", found)


def _major_version(number: str) -> int:
    return int(number.partition(".")[0])


def arch_checks(gpus: Sequence[CudaGpu], arch_list: Sequence[str]) -> Iterator[Check]:
    """Yield a problem for each GPU that this build of torch has no kernels for."""
    for gpu in gpus:
        major, minor = gpu.capability
        if arch_list and not supports_capability((major, minor), arch_list):
            found = (
                f"torch has no kernels for {gpu.name}: compute capability {major}.{minor}, but this build supports "
                f"{' '.join(arch_list)}"
            )
            advice = "select other GPUs with --gpus, or install a build of torch for it"
            yield Check("torch", "code for GPU", "problem", found, advice, code="wrong-version")


def supports_capability(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Return whether one of the architectures of `torch.cuda.get_arch_list()` runs on a GPU.

    Binary code runs on its own major version with the same or a higher minor version (`sm_80` on 8.6), PTX
    (`compute_90`) on all later GPUs, architecture-specific code (`sm_90a`) on that one only."""
    for kernel in arch_list:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)f?", kernel):
            target, is_newer = (int(match[2]), int(match[3])), match[1] == "compute" and not match[4]
            is_same_major = target[0] == capability[0] and not match[4]
            if target == capability or (target < capability and (is_newer or is_same_major)):
                return True
    return False
