"""A rank starter for tests in process: it is forked from the test, and its ranks run a function instead of a training.

Everything else is the product's: pipes, heartbeats, signals, reports of failures, exit codes and kills.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from engine.jobs.launch import rank_process, rank_starter
from engine.jobs.launch.rank_starter import RankStarter
from engine.train.distributed.channel import PipeChannel
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.job import Job, Outcome

# What a rank does instead of a training: it returns the outcome, raises, or exits.
Body = Callable[[PipeChannel], Outcome]


class ForkedRanks(RankStarter):
    """The handle of a rank starter whose rank `i` runs `bodies[i]`. Without bodies, the ranks cannot be started."""

    def __init__(self, *bodies: Body) -> None:
        def fork(command: list[str], **_: object) -> _StarterProcess:
            process = _StarterProcess(target=_run_starter, args=(bodies, command))
            process.start()
            return process

        with patch.object(rank_starter, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL)):
            super().__init__()


class _StarterProcess(ForkProcess):
    """A forked process with the methods of `Popen` that `RankStarter` calls."""

    def wait(self, timeout: float) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("rank starter", timeout)
        return self.exitcode


def _run_starter(bodies: tuple[Body, ...], command: list[str]) -> None:
    """Run the rank starter's own `main` without torch."""

    def train(job: Job, rank_info: RankInfo, store: object, channel: PipeChannel) -> Outcome:
        return bodies[rank_info.rank](channel)

    def fork(job: Job, inherited: rank_process.Inherited) -> list[BaseProcess]:
        if not bodies:
            raise OSError("the ranks cannot be forked")
        context = multiprocessing.get_context("fork")
        ranks = range(job.plan.local_world_size)
        processes = [context.Process(target=rank_process.run_rank, args=(rank, job, inherited)) for rank in ranks]
        for process in processes:
            process.start()
        return list[BaseProcess](processes)

    # pytest has replaced these streams by files of its own.
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", closefd=False) for fd in (1, 2))
    training: Any = ModuleType("engine.train.loop.train")
    training.train = train
    sys.modules[training.__name__] = training
    patch.object(rank_process, "open_local_store", lambda *_: None).start()
    patch.object(rank_starter, "choose_start_method", lambda _: "fork").start()
    patch.object(rank_starter, "_fork", fork).start()
    sys.argv = command[-3:]
    rank_starter.main()
