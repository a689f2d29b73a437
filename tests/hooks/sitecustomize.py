"""The one loader of the tests: what Python imports at the start of every process with this folder on its PYTHONPATH.

Each part is active if the environment asks for it, alone or with the others:

    GPUTRAIN_FAULT  faults in the ranks of a run (faults.py)
    LD_PRELOAD      with the fake CUDA runtime, the CPU kernels that it needs (../rehearsal/cpu_kernels.py)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parent.parent
CUDA_LIBRARY = "libfakecuda.so"


def install_cpu_kernels(_: ModuleType) -> None:
    sys.path.append(str(TESTS / "rehearsal"))
    import cpu_kernels

    cpu_kernels.install()


if os.environ.get("GPUTRAIN_FAULT"):
    import faults

    faults.install()
if CUDA_LIBRARY in os.environ.get("LD_PRELOAD", ""):
    from after_import import call_after_import

    call_after_import("torch", install_cpu_kernels)
