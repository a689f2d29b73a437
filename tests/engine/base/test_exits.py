"""What the end of a process is called, and what to do about it."""

from __future__ import annotations

import signal

import pytest

from engine.base.exits import describe_exit, describe_loader_exit
from support.messages import has_problem

OF_THREADS = ("data.prefetch", "data.batch_size")
OF_WORKERS = ("data.workers", *OF_THREADS)


@pytest.mark.parametrize(("threaded", "advice"), [(False, OF_WORKERS), (True, OF_THREADS)])
def test_advice_for_too_little_memory_names_keys_that_reduce_it(threaded: bool, advice: tuple[str, ...]) -> None:
    killed = describe_exit(-signal.SIGKILL, oom_killed=True, threaded=threaded)
    assert has_problem([killed], "out-of-memory", "", "SIGKILL", *advice)
    full = describe_loader_exit(-signal.SIGBUS, oom_killed=False, threaded=threaded)
    assert has_problem([full], "shm-full", "", "SIGBUS", "(/dev/shm)", "(docker run --shm-size)", *advice)
    assert all(("data.workers" in str(problem)) is not threaded for problem in (killed, full))
