"""Owns one run from the spawn of its ranks to their end: passes their events on, asks them to stop, outlives their
faults, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection as mp_connection
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

import psutil

from engine.beats import Beat, Beats, Place, Watchdog, behind, standing
from engine.channel import FLUSHED, SupervisorEnd
from engine.control import REQUESTS, Asked, take_requests
from engine.events import Control, Event, Flush, RankFailed, Refused
from engine.failure import exit_in_words, oom_kills, root_cause
from engine.job import Ending, ExitCode, Job
from engine.problems import Problem, UsageError
from engine.process import STOPPING, Signals
from engine.runs import RunFolder
from engine.spawned import TELL_WHERE, run_rank

TICK_SECONDS = 0.1
# So long the other ranks may take to tell of the fault that they saw, and to end of themselves.
GRACE_SECONDS = 1.0
# So long no rank may move once the run is to stop, before it is ended without another checkpoint.
STOP_SECONDS = 30.0
# So long a process may take to end that was killed: one that waits for a dead disk or driver never does.
KILL_SECONDS = 3.0
# So long a rank that stands still may take to write to the log where it stands.
TELL_WHERE_SECONDS = 0.3


class Supervisor:
    """One run's ranks. `tell` takes each event that is for the journal; `between` is called at every tick, and must not
    wait; requests come in through the run's folder, where it has one; `asked` is what was asked for before."""

    def __init__(
        self,
        job: Job,
        signals: Signals,
        tell: Callable[[Event], None],
        folder: RunFolder | None,
        between: Callable[[], None],
        asked: Asked,
    ) -> None:
        self._job, self._signals, self._tell, self._folder, self._between = job, signals, tell, folder, between
        self._ends: list[SupervisorEnd] = []
        self._processes: list[BaseProcess] = []
        self._failures: dict[int, RankFailed] = {}
        self._refusals: list[Problem] = []
        self._asked = asked
        self._beats = Beats(job.plan.ranks)
        self._watchdog = Watchdog(self._beats, job.config.run.watchdog)
        self._stopping = Watchdog(self._beats, STOP_SECONDS, except_at=Place.SAVING)
        self._oom_kills = oom_kills()

    def run(self) -> Ending:
        """Raises UsageError where the ranks found that they cannot do what was asked for."""
        try:
            self._spawn()
            doomed: float | None = None
            while self._alive():
                self._listen()
                self._between()
                self._take_requests()
                if self._signals.kill:
                    return Ending("killed", why="killed by a second SIGINT")
                if self._asked.stop and self._stopping.expired() is not None:
                    why = f"no rank moved for {STOP_SECONDS:g} s after that, so there is no checkpoint of the stop"
                    return Ending("killed", why=why)
                if doomed is None and (beats := self._watchdog.expired()) is not None:
                    self._name_the_stuck(beats)
                    break
                if doomed is None and (self._failures or self._refusals):
                    doomed = time.monotonic() + GRACE_SECONDS
                if doomed is not None and time.monotonic() > doomed:
                    break
            self._listen()
        finally:
            self._kill()
            self._beats.close()
        if self._refusals:
            raise UsageError(self._refusals)
        if self._failures:
            failure = root_cause(list(self._failures.values()))
            left = [str(process.pid) for process in self._processes if process.is_alive()]
            if left:
                why = f"; the kernel does not let process {', '.join(left)} end, which still holds what it had"
                failure = replace(failure, cause=failure.cause + why, repeats=True)
            return Ending("failed", failure)
        stopped = any(process.exitcode == ExitCode.STOPPED for process in self._processes)
        return Ending("stopped" if stopped else "finished")

    def _spawn(self) -> None:
        import torch.distributed as dist
        import torch.multiprocessing as mp

        ranks = self._job.plan.ranks
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [mp_connection.Pipe() for _ in range(ranks)]
        theirs = [pipe[1] for pipe in pipes]
        # The tracker lives on without a handler for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        # First, because it would let through again, when it starts, the signals that are held back next.
        resource_tracker.ensure_running()
        # Held back until a rank has handlers: one that still imports would die of a signal that was sent to all.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            arguments = (theirs, self._beats, os.getpid(), self._store.port)
            context = mp.spawn(run_rank, arguments, nprocs=ranks, join=False)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            for connection in theirs:
                connection.close()
        # Not among the arguments of spawn: what is larger than a pipe's buffer would make each rank wait for the import
        # of torch in the one before.
        for mine, _ in pipes:
            with suppress(OSError):
                mine.send(self._job)
        self._ends = [SupervisorEnd(mine) for mine, _ in pipes]
        if self._asked.paused:
            for end in self._ends:
                end.request("pause")
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
                if isinstance(event, Flush):
                    end.request(FLUSHED)
        for rank, process in dead.items():
            code = process.exitcode
            told = code in (ExitCode.FINISHED, ExitCode.STOPPED) or bool(self._refusals)
            if code is not None and not told and rank not in self._failures:
                device = self._job.plan.devices[rank]
                out_of_memory = None if self._oom_kills is None else oom_kills() != self._oom_kills
                cause = exit_in_words(code, out_of_memory=out_of_memory)
                self._failures[rank] = RankFailed(rank=rank, device=device, cause=cause)

    def _name_the_stuck(self, beats: list[Beat]) -> None:
        """Whom the others wait for, with what its process does; the log gets the place in its code."""
        alive = {rank: beats[rank] for rank, process in enumerate(self._processes) if process.is_alive()}
        stuck = behind(alive or dict(enumerate(beats)))
        states = {rank: _process_state(self._processes[rank].pid) for rank in stuck}
        # Where all have come as far, one that the system does not let run is the one.
        held = [rank for rank in stuck if states[rank]] or stuck
        for rank in held:
            if (pid := self._processes[rank].pid) is not None and self._processes[rank].is_alive():
                os.kill(pid, TELL_WHERE)
        time.sleep(TELL_WHERE_SECONDS)
        limit = self._job.config.run.watchdog
        also = f"; so do ranks {', '.join(map(str, held[1:]))}" if len(held) > 1 else ""
        cause = (
            f"no step was made for {limit:g} s (run.watchdog), and the others wait for this rank: "
            f"{standing(beats[held[0]])}{also}{states[held[0]] or '; the log has the place in its code'}"
        )
        self._failures[held[0]] = RankFailed(rank=held[0], device=self._job.plan.devices[held[0]], cause=cause)

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
            process.join(KILL_SECONDS)
        for end in self._ends:
            if end.open:
                end.close()


def _process_state(pid: int | None) -> str:
    """What keeps a process from running, in words; nothing where it runs or waits of itself."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    words = {psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: "it waits for a disk"}
    return f"; {words[status]}" if status in words else ""
