"""Python, torch and what it brings, and whether they fit each other, the driver and the GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engine.doctor.check import Check
from engine.gpus.snapshot import Snapshot
from engine.utils.text import pluralize

ProbeAnswer = Mapping[str, Any]
TORCHVISION_ADVICE = (
    "install both from one index: `pip install --force-reinstall torch torchvision`; for the CPU alone with "
    "`--index-url https://download.pytorch.org/whl/cpu`"
)
TORCH_BUILD_ADVICE = "install a torch that fits the driver (https://pytorch.org/get-started), or a newer driver"


def python_check() -> Check:
    return Check("torch", "gputrain", "ok", f"{version('gputrain')} on Python {platform.python_version()}")


def installed_versions() -> str:
    """The versions that are said to be installed: nothing is imported."""
    words = []
    for name in ("torch", "torchvision"):
        try:
            words.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            words.append(f"no {name}")
    return " and ".join(words)


def no_answer_check(name: str, reason: str) -> Check:
    """Torch was asked, and there is no answer."""
    advice = "try `python -c 'import torch, torchvision; torch.cuda.init()'`: what hangs or fails there does so in runs"
    return Check("torch", name, "problem", f"{installed_versions()}: {reason}", advice)


def torch_checks(torch_info: ProbeAnswer) -> Iterator[Check]:
    """`torch_info` is what the probe says of torch by itself."""
    failed = {name: torch_info["errors"][name] for name in ("torch", "torchvision") if name in torch_info["errors"]}
    for name, error in failed.items():
        found = f"{name} does not import, with {installed_versions()}: {error}"
        yield Check("torch", name, "problem", found, TORCHVISION_ADVICE)
    if "torch" in failed:
        return
    if not failed:
        yield Check(
            "torch",
            "torch",
            "ok",
            f"{torch_info['torch']}, imports together with torchvision {torch_info['torchvision']}",
        )
    if not torch_info["gloo"]:
        yield Check("torch", "gloo", "problem", "this build of torch has no gloo", "install torch from PyPI")


def compatibility_checks(
    torch_info: ProbeAnswer, cuda_info: ProbeAnswer, snapshot: Snapshot | None, visible_gpus: int
) -> Iterator[Check]:
    """Whether torch can use the GPUs of the driver, of which it is shown so many."""
    built = torch_info["cuda"]
    there = 0 if snapshot is None else len(snapshot.gpus)
    if built is None:
        found = f"torch {torch_info['torch']} is built without CUDA"
        if there == 0:
            yield Check("torch", "CUDA", "ok", f"{found}, and there is no NVIDIA GPU to use")
        else:
            yield Check(
                "torch", "CUDA", "problem", f"{found}, and there is {pluralize(there, 'GPU')}", TORCH_BUILD_ADVICE
            )
        return
    if there == 0 or snapshot is None:
        yield Check("torch", "CUDA", "ok", f"torch is built for CUDA {built}, and there is no NVIDIA GPU to use")
    else:
        yield cuda_check(built, snapshot.cuda.value, cuda_info.get("error") if visible_gpus else None)
    yield from arch_checks(cuda_info.get("gpus", []), cuda_info.get("kernels", []))
    if torch_info["nccl"] is not None:
        yield Check("torch", "NCCL", "ok", f"{torch_info['nccl']}, part of torch")
    elif there > 1:
        yield Check("torch", "NCCL", "problem", "this build of torch has no NCCL", "install torch from PyPI")


def cuda_check(torch_cuda: str, driver_cuda: str | None, error: str | None) -> Check:
    """A driver serves every CUDA of its own major version, and those before it."""
    found = f"torch is built for CUDA {torch_cuda}, and the driver serves {driver_cuda or 'an unknown version'}"
    if driver_cuda is not None and _major_version(torch_cuda) > _major_version(driver_cuda):
        return Check("torch", "CUDA", "problem", f"{found}, which is too old", TORCH_BUILD_ADVICE)
    if error is not None:
        advice = f"{TORCH_BUILD_ADVICE}; in a container, start it with `--gpus all`"
        return Check("torch", "CUDA", "problem", f"{found}, yet torch cannot use it: {error}", advice)
    return Check("torch", "CUDA", "ok", found)


def _major_version(number: str) -> int:
    return int(number.partition(".")[0])


def arch_checks(gpus: Sequence[ProbeAnswer], arch_list: Sequence[str]) -> Iterator[Check]:
    """Of the GPUs that torch has no code for. Where torch does not tell for what it has some, of none."""
    for gpu in gpus:
        major, minor = gpu["capability"]
        if arch_list and not supports_capability((major, minor), arch_list):
            found = (
                f"torch has no code for {gpu['name']} (compute capability {major}.{minor}; it has "
                f"{' '.join(arch_list)})"
            )
            advice = "leave it out (--gpus), or install a torch that is built for it"
            yield Check("torch", "code for GPU", "problem", found, advice)


def supports_capability(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Code runs on GPUs of its own major version with the same or a higher minor one (`sm_80` on 8.6), and what is
    compiled when it is loaded (`compute_90`) on all later ones; code for one chip (`sm_90a`) on that one only."""
    for kernel in arch_list:
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
