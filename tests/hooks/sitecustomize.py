"""The one loader of the tests: what Python imports at the start of every process with this folder on its PYTHONPATH.

Each part is active if the environment asks for it, alone or with the others:

    GPUTRAIN_FAULT          faults in the ranks of a run (faults.py)
    FAKE_NVML_IN_PYTHON     the fake NVML without a C compiler (../support/gpu/fake_nvml.py)
    LD_PRELOAD              with the fake CUDA runtime, the CPU kernels that it needs (../rehearsal/cpu_kernels.py)
    COVERAGE_PROCESS_START  coverage of this process, saved also if it leaves by `os._exit`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

TESTS = Path(__file__).parent.parent
CUDA_LIBRARY = "libfakecuda.so"


def install_cpu_kernels(_: ModuleType) -> None:
    sys.path.append(str(TESTS / "rehearsal"))
    import cpu_kernels

    cpu_kernels.install()


def start_coverage() -> None:
    from multiprocessing.process import BaseProcess

    import coverage

    coverage.process_startup()
    exit_now = os._exit

    def save_and_exit(code: int) -> NoReturn:
        measured = coverage.Coverage.current()
        if measured is not None:
            measured.stop()
            measured.save()
        exit_now(code)

    os._exit = save_and_exit
    # With `sigterm = true`, coverage saves the data of a process that SIGTERM ends. SIGKILL would lose it.
    BaseProcess.kill = BaseProcess.terminate  # type: ignore[method-assign]


if os.environ.get("COVERAGE_PROCESS_START"):
    start_coverage()
if os.environ.get("GPUTRAIN_FAULT"):
    import faults

    faults.install()
if os.environ.get("FAKE_NVML_IN_PYTHON"):
    sys.path.append(str(TESTS))
    from support.gpu import fake_nvml

    fake_nvml.install()
if CUDA_LIBRARY in os.environ.get("LD_PRELOAD", ""):
    from after_import import call_after_import

    call_after_import("torch", install_cpu_kernels)
