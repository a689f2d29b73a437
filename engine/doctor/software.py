"""Python, torch and what it brings, and whether they fit each other, the driver and the GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.doctor.check import Check
from engine.gpus.snapshot import Snapshot
from engine.utils.text import counted

Answer = Mapping[str, Any]
TOGETHER_ADVICE = (
    "install both from one index: `pip install --force-reinstall torch torchvision`; for the CPU alone with "
    "`--index-url https://download.pytorch.org/whl/cpu`"
)
BUILD_ADVICE = "install a torch that fits the driver (https://pytorch.org/get-started), or a newer driver"


def python_check() -> Check:
    return Check("torch", "gputrain", "ok", f"{version('gputrain')} on Python {platform.python_version()}")


def installed() -> str:
    """The versions that are said to be installed: nothing is imported."""
    words = []
    for name in ("torch", "torchvision"):
        try:
            words.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            words.append(f"no {name}")
    return " and ".join(words)


def silent_check(name: str, reason: str) -> Check:
    """Torch was asked, and there is no answer."""
    advice = "try `python -c 'import torch, torchvision; torch.cuda.init()'`: what hangs or fails there does so in runs"
    return Check("torch", name, "problem", f"{installed()}: {reason}", advice)


def torch_checks(told: Answer) -> Iterator[Check]:
    """`told` is what the probe says of torch by itself."""
    failed = {name: told["errors"][name] for name in ("torch", "torchvision") if name in told["errors"]}
    for name, error in failed.items():
        found = f"{name} does not import, with {installed()}: {error}"
        yield Check("torch", name, "problem", found, TOGETHER_ADVICE)
    if "torch" in failed:
        return
    if not failed:
        yield Check("torch", "torch", "ok", f"{told['torch']}, imports together with torchvision {told['torchvision']}")
    if not told["gloo"]:
        yield Check("torch", "gloo", "problem", "this build of torch has no gloo", "install torch from PyPI")


def fit_checks(told: Answer, cuda: Answer, snapshot: Snapshot | None, shown: int) -> Iterator[Check]:
    """Whether torch can use the GPUs of the driver, of which it is shown so many."""
    built = told["cuda"]
    there = 0 if snapshot is None else len(snapshot.gpus)
    if built is None:
        found = f"torch {told['torch']} is built without CUDA"
        if there == 0:
            yield Check("torch", "CUDA", "ok", f"{found}, and there is no NVIDIA GPU to use")
        else:
            yield Check("torch", "CUDA", "problem", f"{found}, and there is {counted(there, 'GPU')}", BUILD_ADVICE)
        return
    if there == 0 or snapshot is None:
        yield Check("torch", "CUDA", "ok", f"torch is built for CUDA {built}, and there is no NVIDIA GPU to use")
    else:
        yield cuda_check(built, snapshot.cuda.value, cuda.get("error") if shown else None)
    yield from kernel_checks(cuda.get("gpus", []), cuda.get("kernels", []))
    if told["nccl"] is not None:
        yield Check("torch", "NCCL", "ok", f"{told['nccl']}, part of torch")
    elif there > 1:
        yield Check("torch", "NCCL", "problem", "this build of torch has no NCCL", "install torch from PyPI")


def cuda_check(built: str, served: str | None, error: str | None) -> Check:
    """A driver serves every CUDA of its own major version, and those before it."""
    found = f"torch is built for CUDA {built}, and the driver serves {served or 'an unknown version'}"
    if served is not None and _major(built) > _major(served):
        return Check("torch", "CUDA", "problem", f"{found}, which is too old", BUILD_ADVICE)
    if error is not None:
        advice = f"{BUILD_ADVICE}; in a container, start it with `--gpus all`"
        return Check("torch", "CUDA", "problem", f"{found}, yet torch cannot use it: {error}", advice)
    return Check("torch", "CUDA", "ok", found)


def _major(number: str) -> int:
    return int(number.partition(".")[0])


def kernel_checks(gpus: Sequence[Answer], kernels: Sequence[str]) -> Iterator[Check]:
    """Of the GPUs that torch has no code for. Where torch does not tell for what it has some, of none."""
    for gpu in gpus:
        major, minor = gpu["capability"]
        if kernels and not runs_on((major, minor), kernels):
            found = (
                f"torch has no code for {gpu['name']} (compute capability {major}.{minor}; it has {' '.join(kernels)})"
            )
            advice = "leave it out (--gpus), or install a torch that is built for it"
            yield Check("torch", "code for GPU", "problem", found, advice)


def runs_on(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Code runs on GPUs of its own major version with the same or a higher minor one (`sm_80` on 8.6), and what is
    compiled when it is loaded (`compute_90`) on all later ones; code for one chip (`sm_90a`) on that one only."""
    for kernel in kernels:
        kind, _, number = kernel.partition("_")
        exact = number.endswith("a")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        made_for = int(digits[:-1] or 0), int(digits[-1])
        if capability == made_for or (not exact and kind == "compute" and capability >= made_for):
            return True
        if not exact and kind == "sm" and capability[0] == made_for[0] and capability >= made_for:
            return True
    return False
