"""Readers of foreign files raise only documented exceptions and need little memory, whatever the files contain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_readers.py")


def fuzz_readers(examples: int) -> None:
    """Run the program in a process of its own, because it limits its address space."""
    tests = PROGRAM.parents[1]
    # Each thread of OpenBLAS would reserve address space.
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{tests}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(examples)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readers_raise_only_documented_exceptions() -> None:
    fuzz_readers(6)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_readers_raise_only_documented_exceptions_for_many_files() -> None:
    fuzz_readers(20_000)
