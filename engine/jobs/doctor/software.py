"""Checks of torch and torchvision, and of whether they can use the GPUs. `probe` finds what they look at."""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.codec import Record, field
from engine.base.libraries import installed_version
from engine.base.text import pluralize
from engine.jobs.doctor.check import Check

TORCHVISION_ADVICE = (
    "install both from the same index: `pip install --force-reinstall torch torchvision`, or for the CPU "
    "`uv pip install --reinstall --torch-backend cpu torch torchvision`"
)
TORCH_BUILD_ADVICE = (
    "install a build of torch for this driver (https://pytorch.org/get-started), or a newer driver; in a container, "
    "start it with `--gpus all`"
)


class Libraries(Record, frozen=True, kw_only=True):
    """The versions of torch and torchvision by their names, and why one cannot be imported; empty if both can."""

    versions: dict[str, str] = field(default_factory=dict)
    error: str = ""


class CudaInfo(Record, frozen=True, kw_only=True):
    """The version of CUDA that torch is built for, None without CUDA; whether it has NCCL; and why it cannot
    initialize CUDA, empty if it can."""

    cuda: str | None = None
    has_nccl: bool = False
    error: str = ""


def installed_versions() -> str:
    """Return the installed versions of torch and torchvision, without importing them."""
    versions = {name: installed_version(name) for name in ("torch", "torchvision")}
    return " and ".join(f"{name} {number}" if number else f"no {name}" for name, number in versions.items())


def libraries_check(libraries: Libraries) -> Check:
    """Check that torch and torchvision import."""
    if not libraries.error:
        found = f"{libraries.versions['torch']}, works with torchvision {libraries.versions['torchvision']}"
        return Check("torch", "torch", "ok", found)
    found = f"cannot be imported ({installed_versions()}): {libraries.error}"
    return Check("torch", "torch", "problem", found, TORCHVISION_ADVICE, code="library-failed")


def cuda_checks(info: CudaInfo, gpus: int, visible: int) -> Iterator[Check]:
    """Check that torch can use the GPUs of a host; `visible` is how many of them CUDA_VISIBLE_DEVICES shows."""
    build = f"torch is built {'without CUDA' if info.cuda is None else f'for CUDA {info.cuda}'}"
    if gpus == 0:
        yield Check("torch", "CUDA", "ok", f"{build}, and this host has no NVIDIA GPU")
    elif info.cuda is None:
        found = f"{build}, but this host has {pluralize(gpus, 'GPU')}"
        yield Check("torch", "CUDA", "problem", found, TORCH_BUILD_ADVICE, code="wrong-version")
    elif info.error and visible:
        found = f"{build}, but cannot initialize it: {info.error}"
        yield Check("torch", "CUDA", "problem", found, TORCH_BUILD_ADVICE, code="library-failed")
    else:
        yield Check("torch", "CUDA", "ok", build)
    if info.cuda is not None and gpus > 1 and not info.has_nccl:
        found = "this build of torch has no NCCL backend"
        yield Check("torch", "NCCL", "problem", found, "install torch from PyPI", code="wrong-version")
