"""The GPU rehearsal: run `gputrain` and torch's unchanged CUDA build on two fake GPUs.

The library of rehearsal/*.c replaces the CUDA runtime, the driver and NCCL of every process that preloads it.
rehearsal/cpu_kernels.py computes on the CPU, and the fake NVML of fake_gpu_host.py shows the same GPUs.
Tests use it through the fixture `rehearsal` in conftest.py.
"""

from __future__ import annotations

import fcntl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.gpu.fake_gpu_host import COMPILER, FakeGpuHost, gpu_line
from support.gputrain_command import Gputrain, read_events

FOLDER = Path(__file__).parents[2] / "rehearsal"
LIBRARY = "libfakecuda.so"  # hooks/sitecustomize.py looks for this name
# cpu_kernels.py and the functions in C are written for what these versions call.
SERVED_TORCH = ("2.9", "2.11", "2.14", "2.15")


def reason_to_skip(compiler: str | None, torch_version: str, cuda_version: str | None) -> str | None:
    """Return why this host cannot run the rehearsal, or None if it can."""
    if compiler is None:
        return "no C compiler, which the fake CUDA runtime needs"
    if cuda_version is None:
        return f"torch {torch_version} is not a CUDA build"
    if not torch_version.startswith(tuple(f"{version}." for version in SERVED_TORCH)):
        served = f"{', '.join(SERVED_TORCH[:-1])} and {SERVED_TORCH[-1]}"
        return f"the fake CUDA runtime serves torch {served}, not {torch_version}"
    return None


def find_reason_to_skip() -> str | None:
    import torch

    return reason_to_skip(COMPILER, torch.__version__, torch.version.cuda)


def build_fake_cuda(folder: Path) -> dict[str, str]:
    """Build the library in `folder` unless another process did; return the variables that make processes use it."""
    import torch

    library = folder / LIBRARY
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            packages = Path(torch.__file__).resolve().parent.parent
            runtime = next(packages.glob("nvidia/*/include/cuda_runtime_api.h")).parent
            headers = ["-I", runtime, "-I", packages / "nvidia/nccl/include"]
            # The wheel of the CUDA runtime lacks some of the headers that its own headers include.
            headers += ["-idirafter", packages / "triton/backends/nvidia/include"]
            options = ["-std=gnu2x", "-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", library]
            subprocess.run([str(COMPILER), *map(str, [*options, *headers, *FOLDER.glob("*.c")])], check=True)
    return {"LD_PRELOAD": str(library), "FAKE_CUDA_NAN": "1"}


class Rehearsal(Gputrain):
    """The `gputrain` command on a host with two free fake GPUs of 2 GiB, whose new memory is filled with NaN."""

    def __init__(self, gputrain: Gputrain, host: FakeGpuHost, fake_cuda: dict[str, str]) -> None:
        super().__init__(gputrain.folder, gputrain.environment, gputrain.started)
        self.host = host
        self.log_folder = self.folder / "cuda"
        self.log_folder.mkdir()
        self.environment = gputrain.environment | host.environment | fake_cuda | {"FAKE_CUDA_LOG": str(self.log_folder)}
        del self.environment["CUDA_VISIBLE_DEVICES"]
        host.set_scene(gpu_line(0, used=100), gpu_line(1, used=100))

    def run(self, name: str, *arguments: str, **variables: str) -> Path:
        """Run the training `name` to its end, and return its folder."""
        done = self("run", "--headless", *arguments, "--name", name, **variables)
        assert done.returncode == 0, done.stderr
        return self.runs / name

    def cuda_log(self) -> dict[int, list[str]]:
        """Return the log of each process that called CUDA: its contexts, NCCL calls and errors."""
        return {int(path.name): path.read_text().splitlines() for path in self.log_folder.iterdir()}


@dataclass(frozen=True)
class DdpRun:
    """A finished run on two fake GPUs, its arguments, and what each of its processes called."""

    gputrain: Rehearsal
    arguments: tuple[str, ...]
    path: Path
    cuda_log: dict[int, list[str]]


def nccl_backend() -> str:
    """Return the backend that `device.backend=auto` takes for two GPUs."""
    from engine.train.distributed.process_group import torch_backend

    return torch_backend("nccl-legacy")


def run_started(run: Path) -> dict[str, Any]:
    return next(event for event in read_events(run) if event["type"] == "run_started")


def epochs_of(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["type"] == "epoch"]


def losses_of(run: Path) -> list[float]:
    """Return the losses of all steps and of all evaluations."""
    steps = [loss for event in read_events(run) if event["type"] == "step" for loss in event["losses"]]
    return steps + [epoch["val_loss"] for epoch in epochs_of(run)]
