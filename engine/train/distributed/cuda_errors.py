"""Known failures of CUDA, NCCL and the NVIDIA driver: the cause in one sentence, with the remedy.

`failures` describes exceptions with them, and `aborts` the log lines of a rank that torch has aborted.
"""

from __future__ import annotations

import re
from dataclasses import replace

from engine.base.errors import Problem

MAX_MESSAGE_CHARS = 160

_XID = "look for the Xid of this GPU in dmesg"

# Pattern of the message; cause and remedy. The first match counts. torch ("CUDA error: …"), NCCL ("Cuda failure 217
# '…'") and their older versions wrap CUDA's message differently, so the patterns contain only the message itself.
_KNOWN_ERRORS = (
    (
        r"creating shared memory segment|create shared memory file",
        Problem(
            "",
            "the shared memory (/dev/shm) is too small for NCCL: enlarge it; a container needs --shm-size=1g "
            "or --ipc=host",
            code="shm-full",
        ),
    ),
    (
        r"ibv_\w+ failed with error Cannot allocate memory",
        Problem(
            "",
            "the limit on locked memory is too low for InfiniBand: raise it with `ulimit -l unlimited`; a container "
            "needs --ulimit memlock=-1",
            code="limit-too-low",
        ),
    ),
    (
        r"no socket interface found|no NCCL_SOCKET_IFNAME|neither AF_INET",
        Problem(
            "",
            "NCCL found no network interface: unset NCCL_SOCKET_IFNAME, or set it to an interface that `ip address` "
            "lists",
            code="connection-failed",
        ),
    ),
    (r"Duplicate GPU detected", Problem("", "two ranks use the same GPU: start one rank per GPU", code="gpu-in-use")),
    (
        r"Mismatched NCCL version|NCCL version mismatch",
        Problem(
            "", "the hosts have different versions of NCCL: install the same torch on all of them", code="wrong-version"
        ),
    ),
    (
        r"peer access is not supported",
        Problem("", "these GPUs cannot access each other's memory: set NCCL_P2P_DISABLE=1", code="not-supported"),
    ),
    (
        r"peer mapping resources exhausted",
        Problem(
            "",
            "CUDA allows peer access between at most 8 GPUs: use fewer GPUs, or set NCCL_P2P_DISABLE=1",
            code="not-supported",
        ),
    ),
    (
        r"driver on your system is too old|driver version is insufficient|not supported in the installed CUDA driver"
        r"|Insufficient driver",
        Problem(
            "",
            "the NVIDIA driver is too old for this torch: update the driver, or install torch for the CUDA version "
            "that nvidia-smi shows",
            code="wrong-version",
        ),
    ),
    (
        r"unsupported display driver / cuda driver combination|Driver/library version mismatch",
        Problem(
            "",
            "the kernel module and the libraries of the NVIDIA driver have different versions: reboot the host; in a "
            "container, remove its own libcuda",
            code="wrong-version",
        ),
    ),
    (
        r"forward compatibility was attempted on non supported HW",
        Problem(
            "",
            "this GPU does not support the CUDA compatibility libraries: remove cuda-compat from LD_LIBRARY_PATH, or "
            "update the driver",
            code="not-supported",
        ),
    ),
    (
        r"system not yet initialized",
        Problem(
            "",
            "the NVSwitches of this host are not initialized: start nvidia-fabricmanager in the version of the driver",
            code="driver-unavailable",
        ),
    ),
    (
        r"no kernel image is available",
        Problem(
            "",
            "this torch has no kernels for this GPU: install a torch for its compute capability",
            code="wrong-version",
        ),
    ),
    (
        r"uncorrectable ECC error|ECC_UNCORRECTABLE",
        Problem(
            "",
            f"the memory of this GPU is faulty (ECC): reset it with nvidia-smi --gpu-reset, train without it, "
            f"and {_XID}",
            code="gpu-memory-errors",
        ),
    ),
    (
        r"uncorrectable NVLink error|peer GPU memory over nvlink",
        Problem(
            "",
            f"an NVLink of this GPU is faulty: check `nvidia-smi nvlink --errorcounters`, and {_XID}",
            code="gpu-failed",
        ),
    ),
    (
        r"GPU is lost|fallen off the bus|NVRM: Xid",
        Problem("", f"the driver lost this GPU: {_XID}, check power and cooling, and reboot the host", code="gpu-lost"),
    ),
    (
        r"busy or unavailable",
        Problem(
            "",
            "another process uses this GPU exclusively: end it, or allow several with nvidia-smi "
            "--compute-mode=DEFAULT",
            code="gpu-in-use",
        ),
    ),
    (
        # Not "device-side assertions", which torch advises after any CUDA error.
        r"device-side assert triggered",
        Problem(
            "",
            "an index is out of range in a GPU kernel, for example a label that is not a class: see `Assertion` in the "
            "log; with device.gpus=cpu, the traceback shows the operation",
            code="bad-label",
        ),
    ),
    (
        r"illegal memory access|misaligned address|illegal instruction",
        Problem(
            "",
            f"a GPU kernel crashed: set CUDA_LAUNCH_BLOCKING=1 to see which; if only one GPU has the error, {_XID}",
            code="gpu-failed",
        ),
    ),
    (
        r"unspecified launch failure|hardware stack error|CUDA error: unknown error|Cuda failure.*'unknown error'",
        Problem(
            "", f"this GPU or its driver failed: {_XID}, and reset it with nvidia-smi --gpu-reset", code="gpu-failed"
        ),
    ),
)


# Words of CUDA's messages are common ("illegal instruction"). Any exception of user code may contain them.
_SOURCE = re.compile(r"cuda|nccl|nvidia|nvml|nvrm", re.IGNORECASE)


def find_known_error(text: str) -> Problem | None:
    """Return cause and remedy of a message of CUDA, NCCL or the driver, with the line that says so; None if it is not a
    known one."""
    last_error = nccl_last_error(text)
    lines = [line for line in map(str.strip, text.splitlines()) if line == last_error or _SOURCE.search(line)]
    for pattern, known in _KNOWN_ERRORS:
        if (line := next(filter(re.compile(pattern).search, lines), None)) is not None:
            return replace(known, reason=f"{known.reason} ({shorten(line)})")
    return None


def nccl_last_error(text: str) -> str | None:
    """Return NCCL's own message, which follows "Last error:" in an exception of torch; None if there is none."""
    match = re.search(r"^Last error:\s*(\S.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def shorten(line: str) -> str:
    """Return the message with at most `MAX_MESSAGE_CHARS` characters."""
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 1]}…"
