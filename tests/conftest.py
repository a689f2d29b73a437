"""Fixtures for all tests: the installed command, a fake NVIDIA driver, and finished runs shared by several tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_gpu_host import FakeGpuHost, build_fake_driver
from gputrain_command import GPUTRAIN, ROOT, FinishedRun, Gputrain, isolated_gputrain


@pytest.fixture
def gputrain(tmp_path: Path) -> Iterator[Gputrain]:
    yield from isolated_gputrain(tmp_path)


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that make NVML load the fake driver."""
    return build_fake_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gpu_host(tmp_path: Path, fake_driver: dict[str, str]) -> FakeGpuHost:
    """Host whose GPUs are set with `set_scene`. Until then, no driver is loaded."""
    return FakeGpuHost(tmp_path, fake_driver)


@pytest.fixture(scope="session")
def shared_gputrain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gputrain]:
    """Command for runs that several tests read."""
    yield from isolated_gputrain(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def repeated_digits_run(shared_gputrain: Gputrain) -> subprocess.Popen[str]:
    """A repetition of `digits_run`, running concurrently with it."""
    return shared_gputrain.start("run", "--headless", "digits", "--name", "again")


@pytest.fixture(scope="session")
def digits_run(shared_gputrain: Gputrain, repeated_digits_run: subprocess.Popen[str]) -> FinishedRun:
    """The README's main example, with its events on stdout."""
    done = shared_gputrain("run", "--headless", str(ROOT / "configs" / "digits.yaml"), "--name", "digits", "--json")
    return FinishedRun(done, shared_gputrain.runs / "digits")


@pytest.fixture(scope="session")
def short_run_on_terminal(shared_gputrain: Gputrain) -> subprocess.Popen[str]:
    """A run like `short_run`, concurrently and on a terminal. Its output goes to the file `typescript`."""
    command = f"{GPUTRAIN} run --headless digits --name shown --ranks 1 --epochs 2 run.log_every=5"
    script = shutil.which("script") or "/usr/bin/script"
    return shared_gputrain.start(script, "-qec", command, "typescript", stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def short_run(shared_gputrain: Gputrain, short_run_on_terminal: subprocess.Popen[str]) -> FinishedRun:
    """A run with one rank and two epochs, and with the default output."""
    done = shared_gputrain("run", "--headless", "digits", "--name", "short", "--ranks", "1", "--epochs", "2")
    return FinishedRun(done, shared_gputrain.runs / "short")
