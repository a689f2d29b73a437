"""Ranks are forked only by a process without threads that has not touched a GPU; a run reports how it started them."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from engine.base.exit_codes import ExitCode
from engine.jobs.launch import rank_starter
from engine.jobs.launch.rank_process import Inherited, InheritedFd, run_spawned_rank
from engine.jobs.launch.rank_starter import choose_start_method, find_fork_obstacle
from support.messages import raises_problem


def run_in_single_thread(action: Callable[[], object]) -> str:
    """Return the result of `action` in a forked child, which has one thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(action()).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_fork_obstacle_is_none_in_single_thread() -> None:
    assert run_in_single_thread(find_fork_obstacle) == "None"
    assert run_in_single_thread(lambda: choose_start_method("auto")) == "fork"
    assert run_in_single_thread(lambda: choose_start_method("spawn")) == "spawn"


def test_fork_obstacle_counts_threads() -> None:
    def start_threads() -> str | None:
        end = threading.Event()
        for _ in range(2):
            threading.Thread(target=end.wait, daemon=True).start()
        return find_fork_obstacle()

    assert run_in_single_thread(start_threads) == "has 3 threads"


def test_fork_obstacle_finds_initialized_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert run_in_single_thread(find_fork_obstacle) == "uses a GPU"


def test_fork_obstacle_finds_open_driver_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(rank_starter, "_GPU_FILES", (str(tmp_path / "nvidia"),))
    with driver.open("w"):
        assert run_in_single_thread(find_fork_obstacle) == "uses a GPU"
    assert run_in_single_thread(find_fork_obstacle) == "None"


def test_choose_start_method_spawns_or_refuses_with_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_starter, "find_fork_obstacle", lambda: "uses a GPU")
    assert choose_start_method("auto") == "spawn"
    with raises_problem("not-supported", "device.start_method", "uses a GPU", "auto", "spawn"):
        choose_start_method("fork")


def test_spawned_rank_prints_error_of_job_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job_file, pipe = os.memfd_create("job"), mp.Pipe()[0]
    os.write(job_file, b"cos\nno_such_name\n.")
    inherited = Inherited([pipe], InheritedFd(job_file), InheritedFd(job_file), pipe, os.getpid())
    context = mp.start_processes(
        run_spawned_rank, args=(InheritedFd(job_file), inherited), nprocs=1, join=False, start_method="fork"
    )
    os.close(job_file)
    [process] = context.processes
    process.join()
    assert process.exitcode == ExitCode.FAILED
    assert "AttributeError: Can't get attribute 'no_such_name'" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
