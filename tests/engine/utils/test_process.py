"""What blocks a process, from the files that the kernel shows of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.utils.process import blocked_reason


def write_process(proc: Path, state: str, **files: str) -> None:
    """Write the files of process 7."""
    folder = proc / "7"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"7 (python (D) x) {state} 1 7 7 0 -1")
    for name, content in files.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"wchan": "__down_common"}, "it is in a call of the kernel that does not return (__down_common)"),
        ({"wchan": "0"}, "it is in a call of the kernel that does not return (disk I/O or a driver)"),
        ({}, "it is in a call of the kernel that does not return (disk I/O or a driver)"),
    ],
)
def test_blocked_reason_names_function_of_kernel(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    write_process(tmp_path, "D", **files)
    assert blocked_reason(7, tmp_path) == reason
