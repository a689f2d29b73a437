"""The tests with the marker `gpu` that need no real card pass on the fake GPUs, in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fake_cuda import Rehearsal
from gputrain_command import ROOT

# These test in their own process; other gpu tests start runs.
IN_PROCESS = ["engine/training", "engine/data"]


def run_gpu_tests(rehearsal: Rehearsal, folders: list[str]) -> None:
    paths = [str(ROOT / "tests" / folder) for folder in folders]
    options = ["-m", "gpu and not card", "-q", "-p", "no:cacheprovider", "--basetemp", str(rehearsal.folder / "tests")]
    environment = {key: value for key, value in rehearsal.environment.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
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


def test_gpu_tests_of_training_and_data_pass(rehearsal: Rehearsal) -> None:
    run_gpu_tests(rehearsal, IN_PROCESS)


@pytest.mark.rehearsal
@pytest.mark.timeout(1000)
def test_all_gpu_tests_pass(rehearsal: Rehearsal) -> None:
    run_gpu_tests(rehearsal, [""])
