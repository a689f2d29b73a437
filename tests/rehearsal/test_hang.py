"""A rank that hangs on the GPU, with the timeouts and the abort of torch's own ProcessGroupNCCL."""

from __future__ import annotations

import pytest

from support.gpu.fake_cuda import Rehearsal
from support.gpu.fake_gpu_host import gpu_uuid
from support.gputrain_command import read_failures

RUN = ("run", "--headless", "digits", "--model", "linear", "--gpus", "free:2", "--name", "a")


@pytest.fixture
def hang(rehearsal: Rehearsal) -> Rehearsal:
    """Make rank 1 hang at step 12; the collectives of rank 0 then stay pending on its GPU."""
    rehearsal.inject_fault("hang", 1, 12, once=True)
    rehearsal.environment["FAKE_NCCL_HANG"] = str(rehearsal.folder / "fault-0")
    return rehearsal


@pytest.mark.rehearsal
def test_nccl_heartbeat_timeout_outlasts_watchdog(rehearsal: Rehearsal) -> None:
    arguments = ("run", "--headless", "--dry-run", "digits", "--gpus", "free:2")
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 660," in rehearsal(*arguments, TORCH_CPP_LOG_LEVEL="INFO").stderr


@pytest.mark.rehearsal
def test_watchdog_names_hung_rank_before_nccl_times_out(hang: Rehearsal) -> None:
    done = hang(*RUN, "run.watchdog=3", "device.timeout=15")
    assert read_failures(hang.runs / "a") == [(1, "rank-hung")]
    assert f"rank 1 ({gpu_uuid(1)}) " in done.stderr and " 3 s (run.watchdog)" in done.stderr
    assert "Watchdog caught" not in (hang.runs / "a" / "log.txt").read_text()


@pytest.mark.rehearsal
def test_hung_rank_is_named_if_nccl_aborts_rank_that_waits(hang: Rehearsal) -> None:
    # By default, torch waits for a minute so that other ranks can write debug information.
    done = hang(*RUN, "run.watchdog=0", "device.timeout=15", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1")
    log = (hang.runs / "a" / "log.txt").read_text()
    ended_by_torch = ("Process group watchdog thread terminated with", "Aborting process on rank 0 due to timeout")
    assert any(message in log for message in ended_by_torch)
    assert (1, "rank-hung") in read_failures(hang.runs / "a")
    assert f"rank 1 ({gpu_uuid(1)}) failed: a collective timed out" in done.stderr
