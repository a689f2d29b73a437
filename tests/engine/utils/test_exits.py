"""What the end of a process is called, and what to do about it."""

from __future__ import annotations

import signal

import pytest

from engine.utils.exits import describe_exit, describe_loader_exit

OF_WORKERS, OF_THREADS = (
    "reduce data.workers, data.prefetch or data.batch_size",
    "reduce data.prefetch or data.batch_size",
)


@pytest.mark.parametrize(("threaded", "advice"), [(False, OF_WORKERS), (True, OF_THREADS)])
def test_advice_for_too_little_memory_names_keys_that_reduce_it(threaded: bool, advice: str) -> None:
    killed = describe_exit(-signal.SIGKILL, oom_killed=True, threaded=threaded)
    assert killed == f"it was killed by SIGKILL: the host ran out of memory; {advice}"
    loaders = "decode threads" if threaded else "DataLoader workers"
    assert describe_loader_exit(-signal.SIGBUS, oom_killed=False, threaded=threaded) == (
        f"it was killed by SIGBUS: the shared memory (/dev/shm) is too small for the batches of the {loaders}: "
        f"{advice}, or increase the shared memory (docker run --shm-size)"
    )
