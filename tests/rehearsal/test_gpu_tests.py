"""The tests with the marker `gpu` that need no real card pass on the fake GPUs, each folder in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.gpu.fake_cuda import Rehearsal
from support.gputrain_command import ROOT


@pytest.mark.rehearsal
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("folder", ["engine", "end_to_end"])
def test_gpu_tests_pass(rehearsal: Rehearsal, folder: str) -> None:
    options = ["-m", "gpu and not card", "-q", "-p", "no:cacheprovider", "--basetemp", str(rehearsal.folder / "tests")]
    environment = {key: value for key, value in rehearsal.environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(ROOT / "tests" / folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    last_line = done.stdout.splitlines()[-1]
    assert " passed" in last_line
    assert "skipped" not in last_line
