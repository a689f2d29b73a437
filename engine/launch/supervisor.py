"""Owns one run from the spawn of its ranks to their end: passes their events on, asks them to stop, outlives their
faults, and leaves no process behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Pipe

import psutil

from engine.distributed.channel import FLUSHED, SupervisorEnd
from engine.distributed.failures import root_cause
from engine.distributed.watchdog import Beat, Beats, Place, Watchdog, behind, standing
from engine.launch.forkserver import Spawner
from engine.launch.rank_process import TELL_WHERE
from engine.runs.control import REQUESTS, Asked, take_requests
from engine.runs.events import Control, Event, Flush, RankFailed, Refused
from engine.training.job import Ending, ExitCode, Job
from engine.utils.errors import Problem, UsageError
from engine.utils.exits import exit_in_words, oom_kills
from engine.utils.process import Signals

TICK_SECONDS = 0.1
# So long the other ranks may take to tell of the fault that they saw, and to end of themselves.
GRACE_SECONDS = 1.0
# So long no rank may move once the run is to stop, before it is ended without another checkpoint.
STOP_SECONDS = 30.0
# So long a rank that stands still may take to write to the log where it stands.
TELL_WHERE_SECONDS = 0.3


class Supervisor:
    """The ranks of one run. `tell` takes each event for the journal; `between` is called at every tick and must not
    block; requests come in through the job's folder, if it has one; `asked` holds the requests of earlier attempts."""

    def __init__(
        self,
        job: Job,
        spawner: Spawner,
        signals: Signals,
        tell: Callable[[Event], None],
        between: Callable[[], None],
        asked: Asked,
    ) -> None:
        self._job, self._signals, self._tell, self._between = job, signals, tell, between
        self._spawner = spawner
        self._ends: list[SupervisorEnd] = []
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
            while self._spawner.alive():
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
            left = [str(self._spawner.pids[rank]) for rank in self._spawner.alive() if self._spawner.pids]
            if left:
                why = f"; the kernel does not let process {', '.join(left)} end, which still holds what it had"
                failure = replace(failure, cause=failure.cause + why, repeats=True)
            return Ending("failed", failure)
        stopped = any(self._spawner.exit_code(rank) == ExitCode.STOPPED for rank in range(self._job.plan.ranks))
        return Ending("stopped" if stopped else "finished")

    def _spawn(self) -> None:
        pipes = [Pipe() for _ in range(self._job.plan.ranks)]
        self._spawner.fork(self._job, [theirs for _, theirs in pipes], self._beats)
        self._ends = [SupervisorEnd(mine) for mine, _ in pipes]
        if self._asked.paused:
            for end in self._ends:
                end.request("pause")

    def _listen(self) -> None:
        """Wait a tick for news of any rank, take it, and note who has died."""
        open_ends = [end for end in self._ends if end.open]
        spawner = [self._spawner.fileno()] if self._spawner.open else []
        mp_connection.wait([*(end.fileno() for end in open_ends), *spawner], TICK_SECONDS)
        # Who is dead is asked first: what the dead have written is then all there to be read.
        self._spawner.look()
        codes = {rank: self._spawner.exit_code(rank) for rank in range(self._job.plan.ranks)}
        for end in open_ends:
            for event in end.receive():
                self._take(event)
                if isinstance(event, Flush):
                    end.request(FLUSHED)
        if self._spawner.failure is not None:
            self._take(self._spawner.failure)
        for rank, code in codes.items():
            told = code in (ExitCode.FINISHED, ExitCode.STOPPED) or bool(self._refusals)
            if code is not None and not told and rank not in self._failures:
                device = self._job.plan.devices[rank]
                out_of_memory = None if self._oom_kills is None else oom_kills() != self._oom_kills
                gone = "the process that forked the ranks is gone: " if self._spawner.gone else ""
                cause = gone + exit_in_words(code, out_of_memory=out_of_memory)
                self._failures[rank] = RankFailed(rank=rank, device=device, cause=cause)

    def _name_the_stuck(self, beats: list[Beat]) -> None:
        """Whom the others wait for, with what its process does; the log gets the place in its code."""
        pids = dict(enumerate(self._spawner.pids))
        alive = {rank: beats[rank] for rank in self._spawner.alive()}
        stuck = behind(alive or dict(enumerate(beats)))
        states = {rank: _process_state(pids[rank]) if rank in pids else "" for rank in stuck}
        # Where all have come as far, one that the system does not let run is the one.
        held = [rank for rank in stuck if states[rank]] or stuck
        for rank in held:
            if rank in pids and rank in alive:
                os.kill(pids[rank], TELL_WHERE)
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
        if self._job.folder is not None:
            for request in take_requests(self._job.folder.control):
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
        self._spawner.kill()
        for end in self._ends:
            if end.open:
                end.close()


def _process_state(pid: int) -> str:
    """What keeps a process from running, in words; nothing where it runs or waits of itself."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    words = {psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)", psutil.STATUS_DISK_SLEEP: "it waits for a disk"}
    return f"; {words[status]}" if status in words else ""
