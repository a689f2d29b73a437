"""What blocks a process, from the files that the kernel shows of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.utils.process import blocked_reason

DRIVER = "it is in a call of the NVIDIA driver that does not return"
STACK = "[<0>] __down_common+0x11c/0x230\n[<0>] {function}+0x4b/0x90{module}\n[<0>] __x64_sys_ioctl+0x8b/0xd0\n"


def write_process(proc: Path, state: str, **files: str) -> None:
    """Write the files of process 7, whose descriptor 9 is a device of the driver, and 3 a file."""
    folder = proc / "7"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd" / "9").symlink_to("/dev/nvidia-uvm")
    (folder / "fd" / "3").symlink_to("/data/train/cat.jpg")
    (folder / "stat").write_text(f"7 (python (D) x) {state} 1 7 7 0 -1")
    for name, content in files.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"wchan": "nvidia_unlocked_ioctl"}, DRIVER),
        ({"wchan": "uvm_va_space_mm_register"}, DRIVER),
        ({"wchan": "__down_common", "stack": STACK.format(function="_nv045211rm", module=" [nvidia]")}, DRIVER),
        ({"wchan": "__down_common", "syscall": "16 0x9 0x30000001 0x0 0x0 0x0 0x0 0x7ffc 0x7faa"}, DRIVER),
        ({"wchan": "folio_wait_bit_common"}, "it is blocked on disk I/O"),
        ({"wchan": "nvme_submit_user_cmd"}, "it is blocked on disk I/O"),
        (
            {"wchan": "io_schedule", "syscall": "0 0x3 0x7f00 0x20000 0x0 0x0 0x0 0x7ffc 0x7faa"},
            "it is blocked on disk I/O",
        ),
        ({"wchan": "__down_common"}, "it is in a call of the kernel that does not return (__down_common)"),
        ({"wchan": "0"}, "it is in a call of the kernel that does not return (disk I/O or a driver)"),
        ({}, "it is in a call of the kernel that does not return (disk I/O or a driver)"),
    ],
)
def test_blocked_reason_tells_driver_from_disk(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_process(tmp_path, "D", **files)
    assert blocked_reason(7, tmp_path) == reason


@pytest.mark.parametrize(("state", "reason"), [("S", ""), ("R", ""), ("T", "its process is stopped (SIGSTOP)")])
def test_blocked_reason_reads_state_after_name(state: str, reason: str, tmp_path: Path) -> None:
    write_process(tmp_path, state, wchan="io_schedule")
    assert blocked_reason(7, tmp_path) == reason
    assert blocked_reason(8, tmp_path) == "", "the process has ended"


def test_raise_open_files_raises_soft_limit_for_children() -> None:
    program = (
        "import os; from engine.utils.host import raise_open_files_limit; raise_open_files_limit(); "
        "os.system('ulimit -Sn')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512)),
    )
    assert done.stdout == "512\n"
