"""Fake GPU host for tests: NVIDIA's Python binding over a fake NVML library that answers from a text file.

The library is `fake_nvml.c` with `fake_nvml_scene.h`.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import pytest

from engine.gpus import nvml
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.sampler import GpuThread, SamplerState
from engine.gpus.snapshot import DRIVER, SamplerOptions, Snapshot

NVML_LIBRARY = "libnvidia-ml.so.1"
COMPILER = shutil.which("cc")
NO_COMPILER = "needs a C compiler"

# Above the highest PID that Linux assigns (2**22).
UNKNOWN_PID = 2**22 + 77


def gpu_uuid(index: int) -> str:
    return f"GPU-{index}{index}{index}{index}0000-1111-2222-3333-444444444444"


def gpu_line(index: int, **values: object) -> str:
    return " ".join([f"gpu uuid={gpu_uuid(index)}", *(f"{key}={value}" for key, value in values.items())])


def eight_gpu_lines(**values: object) -> list[str]:
    return [gpu_line(index, util=90 + index, sm=80, tensor=40, used=61000, **values) for index in range(8)]


def build_fake_driver(folder: Path, *flags: str) -> dict[str, str]:
    """Build the fake driver; return the environment variables that make the binding load it."""
    if COMPILER is None:
        pytest.skip(NO_COMPILER)
    library = folder / NVML_LIBRARY
    source = str(Path(__file__).with_name("fake_nvml.c"))
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NVML_LIBRARY}", *flags, "-o", str(library), source],
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder)}


@dataclass
class FakeGpuHost:
    """Host whose driver answers from a scene file, and the environment for commands that use it."""

    folder: Path
    driver: dict[str, str]
    lines: list[str] = field(default_factory=list)

    @property
    def scene(self) -> Path:
        return self.folder / "scene"

    @property
    def environment(self) -> dict[str, str]:
        reservations = self.folder / "reservations"
        reservations.mkdir(exist_ok=True)
        return self.driver | {"FAKE_NVML": str(self.scene), "GPUTRAIN_RESERVATIONS": str(reservations)}

    def set_scene(self, *lines: str | Sequence[str]) -> None:
        """Replace the scene by these lines (strings or lists of them). Running processes see it at their next call."""
        flat = ["driver 580.95.05", "cuda 13000"]
        for line in lines:
            flat += [line] if isinstance(line, str) else line
        next_scene = self.folder / "next"
        next_scene.write_text("\n".join(flat) + "\n")
        next_scene.replace(self.scene)


def load_fake_driver(driver: dict[str, str]) -> None:
    """Load the fake driver into this process, whose environment was set before the driver existed."""
    ctypes.CDLL(str(Path(driver["LD_LIBRARY_PATH"]) / NVML_LIBRARY))


def sample_gpus() -> Snapshot:
    """Sample the GPUs of the loaded fake driver once, in threads of this process."""
    (driver, cuda), state = nvml.initialize(), SamplerState(SamplerOptions())
    state.reservations = read_reservations()
    threads = [GpuThread(index, state) for index in range(nvml.gpu_count())]
    for thread in threads:
        thread.start()
    with state.changed:
        state.changed.wait_for(lambda: all(thread.has_answered() for thread in threads))
        gpus = [thread.report() for thread in threads]
        for thread in threads:
            thread.retired = True
        state.changed.notify_all()
    for thread in threads:
        thread.join()
    pynvml.nvmlShutdown()
    return Snapshot(time=time.time(), source=DRIVER, host="h", driver=driver, cuda=cuda, gpus=tuple(gpus))


def parse_gpus_json(output: str) -> list[dict[str, Any]]:
    """Parse the GPUs in the output of `gputrain gpus --json`."""
    gpus: list[dict[str, Any]] = json.loads(output)["gpus"]
    return gpus
