"""Fixtures for all tests: the installed command, a fake NVIDIA driver, and finished runs shared by several tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.catalogs import fill_catalogs
from support.gpu.fake_cuda import Rehearsal, build_fake_cuda, find_reason_to_skip
from support.gpu.fake_gpu_host import FakeGpuHost, build_fake_driver, load_fake_driver
from support.gputrain_command import (
    GPUTRAIN,
    ROOT,
    FinishedRun,
    Gputrain,
    SharedGputrain,
    clean_environment,
    isolated_gputrain,
)
from support.servers.ssh_stand_in import SshStandIn

pytest_plugins = ["support.cpu_time"]
SHORT_RUN = ("run", "--headless", "digits", "--ranks", "1", "--epochs", "2")

# No test depends on the load of the machine. `pytest -m hypothesis --hypothesis-profile thorough` tries more examples.
settings.register_profile("ordinary", max_examples=30, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("ordinary")


def restore_signals() -> None:
    """Restore the signals that a shell ignores in background jobs and under `nohup`: `exec` keeps an ignored signal."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            # A handler keeps this process alive, and `exec` resets it to the default.
            signal.signal(number, lambda *_: None)


restore_signals()
# With it, every process that a test starts would compile the package, and every worker each test module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The width of the terminal that starts the tests is none of theirs.
os.environ.pop("COLUMNS", None)
# Each worker has one core at most, and OpenMP's threads spin while they wait for one that has none.
os.environ["OMP_NUM_THREADS"] = "1"

# Collections take a third of the time to import torch and all test modules.
gc.disable()


def pytest_collection_finish() -> None:
    # Otherwise, each full collection traverses every imported module, and pytest makes five of them at its end.
    gc.freeze()
    # Triton's bindings report what is not collected at the exit as leaks.
    atexit.register(gc.unfreeze)
    # With the default thresholds, collections take a fifth of the time of the screen tests.
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True)
def forget_user_code() -> Iterator[None]:
    """Forget the user code that a test imported: another test has another file of the same name."""
    path = list(sys.path)
    yield
    if folders := tuple(f"{folder}/" for folder in sys.path if folder not in path):
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(folders):
                del sys.modules[name]
        sys.path[:] = path


def folder_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give all tests and their processes one cache folder, which holds the catalogs of the model libraries."""
    folder = folder_of_all_workers(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        fill_catalogs(folder)
        yield


@pytest.fixture
def gputrain(tmp_path: Path) -> Iterator[Gputrain]:
    yield from isolated_gputrain(tmp_path)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshStandIn:
    """Hosts behind a stand-in for ssh, for this process and its children."""
    return SshStandIn(tmp_path / "ssh", monkeypatch)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MLflow library, which must not wait long for a server nor contact any other."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    pytest.importorskip("mlflow")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that make NVML load the fake driver."""
    return build_fake_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gpu_host(tmp_path: Path, fake_driver: dict[str, str]) -> FakeGpuHost:
    """Host whose GPUs are set with `set_scene`. Until then, no driver is loaded."""
    return FakeGpuHost(tmp_path, fake_driver)


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that make torch use the fake CUDA runtime. All xdist workers share one build."""
    reason = find_reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    return build_fake_cuda(folder_of_all_workers(tmp_path_factory) / "fake-cuda")


@pytest.fixture
def rehearsal(gputrain: Gputrain, gpu_host: FakeGpuHost, fake_cuda: dict[str, str]) -> Rehearsal:
    return Rehearsal(gputrain, gpu_host, fake_cuda)


@pytest.fixture
def loaded_gpu_host(gpu_host: FakeGpuHost, monkeypatch: pytest.MonkeyPatch) -> FakeGpuHost:
    """The fake driver, for this process and its children."""
    load_fake_driver(gpu_host.driver)
    for name, value in gpu_host.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpu_host


@pytest.fixture(scope="session")
def shared_gputrain(tmp_path_factory: pytest.TempPathFactory) -> SharedGputrain:
    """Command for runs that several tests read, in one folder for all xdist workers."""
    folder = folder_of_all_workers(tmp_path_factory) / "shared"
    return SharedGputrain(folder, clean_environment(folder))


@pytest.fixture(scope="session")
def digits_run(shared_gputrain: SharedGputrain) -> FinishedRun:
    """The README's main example, with its events on stdout."""
    config = str(ROOT / "configs" / "digits.yaml")
    return shared_gputrain.train_once("digits", GPUTRAIN, "run", "--headless", config, "--name", "digits", "--json")


@pytest.fixture(scope="session")
def short_run(shared_gputrain: SharedGputrain) -> FinishedRun:
    """A run with one rank and two epochs, and with the default output."""
    return shared_gputrain.train_once("short", GPUTRAIN, *SHORT_RUN, "--name", "short")


@pytest.fixture(scope="session")
def repeated_short_run(shared_gputrain: SharedGputrain) -> FinishedRun:
    """A repetition of `short_run`, on a terminal."""
    script, command = shutil.which("script") or "/usr/bin/script", " ".join([GPUTRAIN, *SHORT_RUN, "--name again"])
    return shared_gputrain.train_once("again", script, "-qec", command, "/dev/null")
