"""Owns one run from the spawn of its ranks to their end: passes their events on, asks them to stop, outlives their
faults, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection as mp_connection
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from engine.channel import SupervisorEnd
from engine.control import REQUESTS, Asked, take_requests
from engine.events import Control, Event, RankFailed, Refused
from engine.failure import exit_in_words, root_cause
from engine.job import Ending, ExitCode, Job
from engine.problems import Problem, UsageError
from engine.process import Signals
from engine.runs import RunFolder
from engine.spawned import HELD_BACK, run_rank

TICK_SECONDS = 0.1
# So long the other ranks may take to tell of the fault that they saw, and to end of themselves.
GRACE_SECONDS = 1.0


class Supervisor:
    """One run's ranks. `tell` takes each event that is for the journal; `between` is called at every tick, and must not
    wait; requests come in through the run's folder, where it has one."""

    def __init__(
        self,
        job: Job,
        signals: Signals,
        tell: Callable[[Event], None],
        folder: RunFolder | None,
        between: Callable[[], None],
    ) -> None:
        self._job, self._signals, self._tell, self._folder, self._between = job, signals, tell, folder, between
        self._ends: list[SupervisorEnd] = []
        self._processes: list[BaseProcess] = []
        self._failures: dict[int, RankFailed] = {}
        self._refusals: list[Problem] = []
        self._asked = Asked()

    def run(self) -> Ending:
        """Raises UsageError where the ranks found that they cannot do what was asked for."""
        self._spawn()
        try:
            doomed: float | None = None
            while self._alive():
                self._listen()
                self._between()
                self._take_requests()
                if self._signals.kill:
                    return Ending("killed")
                if doomed is None and (self._failures or self._refusals):
                    doomed = time.monotonic() + GRACE_SECONDS
                if doomed is not None and time.monotonic() > doomed:
                    break
            self._listen()
        finally:
            self._kill()
        if self._refusals:
            raise UsageError(self._refusals)
        if self._failures:
            return Ending("failed", root_cause(list(self._failures.values())))
        stopped = any(process.exitcode == ExitCode.STOPPED for process in self._processes)
        return Ending("stopped" if stopped else "finished")

    def _spawn(self) -> None:
        import torch.distributed as dist
        import torch.multiprocessing as mp

        ranks = self._job.plan.ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [mp_connection.Pipe() for _ in range(ranks)]
        theirs = [pipe[1] for pipe in pipes]
        # First, because it would let through again, when it starts, the signals that are held back next.
        resource_tracker.ensure_running()
        # Held back until a rank has handlers: one that still imports would die of a signal that was sent to all.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            context = mp.spawn(run_rank, (theirs, os.getpid(), self._store.port), nprocs=ranks, join=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            for connection in theirs:
                connection.close()
        # Not among the arguments of spawn: what is larger than a pipe's buffer would make each rank wait for the import
        # of torch in the one before.
        for mine, _ in pipes:
            with suppress(OSError):
                mine.send(self._job)
        self._ends = [SupervisorEnd(mine) for mine, _ in pipes]
        self._processes = list(context.processes)

    def _alive(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def _listen(self) -> None:
        """Wait a tick for news of any rank, take it, and note who has died."""
        running = [process.sentinel for process in self._processes if process.is_alive()]
        open_ends = [end for end in self._ends if end.open]
        mp_connection.wait([*(end.fileno() for end in open_ends), *running], TICK_SECONDS)
        # Who is dead is asked first: what the dead have written is then all there to be read.
        dead = {rank: process for rank, process in enumerate(self._processes) if not process.is_alive()}
        for end in open_ends:
            for event in end.receive():
                self._take(event)
        for rank, process in dead.items():
            code = process.exitcode
            told = code in (ExitCode.FINISHED, ExitCode.STOPPED) or bool(self._refusals)
            if code is not None and not told and rank not in self._failures:
                device = self._job.plan.devices[rank]
                self._failures[rank] = RankFailed(rank=rank, device=device, cause=exit_in_words(code))

    def _take(self, event: Event) -> None:
        if isinstance(event, RankFailed):
            self._failures.setdefault(event.rank, event)
        elif isinstance(event, Refused):
            self._refusals = self._refusals or [Problem(where, what) for where, what in event.problems]
        else:
            self._tell(event)

    def _take_requests(self) -> None:
        if self._folder is not None:
            for request in take_requests(self._folder.control):
                self._ask(request.request, request.by)
        if self._signals.by is not None and not self._asked.stop:
            self._ask("stop", self._signals.by)

    def _ask(self, request: str, by: str) -> None:
        """Every rank gets every request, and makes of them what `Asked` does."""
        outcome = self._asked.take(request)
        if request in REQUESTS:
            for end in self._ends:
                if end.open:
                    end.request(request)
        self._tell(Control(request=request, by=by, outcome=outcome))

    def _kill(self) -> None:
        """End whatever is left. Loader processes end with their rank."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        for end in self._ends:
            if end.open:
                end.close()
