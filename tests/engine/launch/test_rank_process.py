"""A rank process that fails before it can send messages to the supervisor."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from engine.launch.rank_process import Inherited, InheritedFd, run_spawned_rank
from engine.utils.exit_codes import ExitCode


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
