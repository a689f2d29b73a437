"""What blocks a process, from the files that the kernel shows of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.process import blocked_reason


def write_process(proc: Path, state: str, wchan: str) -> None:
    """Write the files of process 7."""
    folder = proc / "7"
    folder.mkdir()
    (folder / "stat").write_text(f"7 (python (D) x) {state} 1 7 7 0 -1")
    (folder / "wchan").write_text(wchan)


@pytest.mark.parametrize(
    ("wchan", "named"), [("nvidia_unlocked_ioctl", "nvidia_unlocked_ioctl"), ("0", "disk I/O or a driver")]
)
def test_blocked_reason_names_function_of_kernel(wchan: str, named: str, tmp_path: Path) -> None:
    write_process(tmp_path, "D", wchan)
    assert blocked_reason(7, tmp_path) == f"it is in a call of the kernel that does not return ({named})"


@pytest.mark.parametrize(("state", "reason"), [("S", ""), ("R", ""), ("T", "its process is stopped (SIGSTOP)")])
def test_blocked_reason_reads_state_after_name(state: str, reason: str, tmp_path: Path) -> None:
    write_process(tmp_path, state, "io_schedule")
    assert blocked_reason(7, tmp_path) == reason
    assert blocked_reason(8, tmp_path) == "", "the process has ended"


def test_raise_open_files_raises_soft_limit_for_children() -> None:
    program = (
        "import os; from engine.base.host import raise_open_files_limit; raise_open_files_limit(); "
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
