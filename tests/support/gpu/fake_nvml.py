"""Python version of fake_nvml.c, the fake NVML library, for hosts without a C compiler.

`install()` makes `ctypes.CDLL("libnvidia-ml.so.1")` return an object with the C functions as attributes, so that the
real pynvml runs with its own structures. With $FAKE_NVML_IN_PYTHON, hooks/sitecustomize.py calls it in every process.

The scene file, $FAKE_NVML, describes the host; fake_nvml_scene.h documents its format. All answers equal those of
fake_nvml.c. With FAKE_NVML_OLD=1, symbols that older drivers lack are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

from support.gpu.fake_nvml_functions import FUNCTIONS, address
from support.gpu.fake_nvml_scene import HOST, Answer, enter

LIBRARY = "libnvidia-ml.so.1"

ERRORS = (
    "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
    "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout",
    "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM",
    "GPU is lost", "GPU requires reset", "The operating system has blocked the request",
    "Driver/library version mismatch", "In use", "Insufficient Memory", "No data",
)  # fmt: skip
MISSING = {  # in older drivers
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMigMode",
    "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet",
    "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet",
}  # fmt: skip


def plain(argument: Any) -> Any:
    """Unwrap a ctypes argument: the value of simple types, the address of pointers, the target of byref()."""
    if isinstance(argument, ctypes._SimpleCData):
        return argument.value
    if isinstance(argument, ctypes._Pointer):
        return address(argument)
    return getattr(argument, "_obj", argument)


def error_string(code: Any) -> bytes:
    with contextlib.suppress(Answer):  # nvmlErrorString has no return code
        enter("nvmlErrorString", "host", None)
    return (ERRORS[plain(code)] if 0 <= plain(code) < len(ERRORS) else "Unknown Error").encode()


class Library:
    def __init__(self) -> None:
        self.nvmlErrorString = error_string

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = FUNCTIONS.get(name)
        if function is None or (name in MISSING and os.environ.get("FAKE_NVML_OLD") == "1"):
            raise AttributeError(name)

        def entry(*arguments: Any) -> int:
            values = [plain(argument) for argument in arguments]
            if name == "nvmlGpmMetricsGet":  # the device is that of the first sample
                values.insert(0, HOST.samples.get(address(values[0].sample1), (None, 0, 0))[1])
            first = None if function.kind == "host" else values.pop(0)
            try:
                function.answer(enter(name, function.kind, first), *values)
            except Answer as answer:
                return answer.code
            return 0

        setattr(self, name, entry)
        return entry


def install() -> None:
    library = Library()

    # Patch the class in place: it has subclasses, and other modules have imported it already.
    def new(cls: type, name: object = None, *_arguments: object, **_options: object) -> object:
        return library if name == LIBRARY else object.__new__(cls)

    ctypes.CDLL.__new__ = new  # type: ignore[assignment, method-assign]
